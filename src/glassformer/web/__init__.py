"""The explorer: a local server that computes, a page that draws; and the one-file report.

app/      server (what is refused before any route, routes, responses, errors), query (checked
          requests), workspace (runs, models, results by id, curves)
pages/    one module per page, each with its own ROUTES
static/   the page itself: HTML, CSS and ES modules, served as they are
report/   the one-file report: document is the entry
"""
