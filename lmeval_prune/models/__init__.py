"""lm-eval's model classes of this package, and functions that higher layers register for them as `MODULE:NAME`.

router     called with `Arguments`, returns the `HeadRouter` for their `router=`
process    registers this package with lm-eval in another process of a run
"""

TARGETS: dict[str, str] = {}
