"""Every question that the page can ask: each page's module lists its own."""

from glassformer.web import design, errors, generate, inspect, quantize, runs
from glassformer.web.query import Route

ROUTES: tuple[Route, ...] = (
    *runs.ROUTES,
    *errors.ROUTES,
    *inspect.ROUTES,
    *design.ROUTES,
    *generate.ROUTES,
    *quantize.ROUTES,
)
