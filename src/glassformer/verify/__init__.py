"""Claims about models, checked: functions that return findings.

The package is callable: `glassformer.verify(model)` is `glassformer.verify.report.verify`, although
a package of that name exists.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, thing: object = None, **options: Any) -> Any:
        from glassformer.verify.report import verify

        return verify(thing, **options)


sys.modules[__name__].__class__ = _CallablePackage
