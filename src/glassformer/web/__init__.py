"""The explorer: a local server that computes, and a page that draws; the one-file report.

server    the app: routes, answers, errors           guard   what is refused before any route
lab       runs, models and kept results, by id       query   checked plain data in, answers out
runs, errors, inspect, design, generate, quantize    one page's questions each
static/   the page itself: HTML, CSS and ES modules, served as they are
"""
