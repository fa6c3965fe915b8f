"""The rows of the certificate, one module for each subject."""
