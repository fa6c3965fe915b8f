"""The one-file report of a run; `document.report_html` is the entry."""
