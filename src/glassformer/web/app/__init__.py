"""The server, without any page: routing, protection, requests, workspace."""
