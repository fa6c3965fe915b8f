"""Limits on what one request may ask for: sizes, counts and depths."""

#: Bytes of a request's body.
BODY_BYTES = 64 * 1024
#: Seconds in which a body must have arrived.
BODY_SECONDS = 10.0
#: Bytes of a request's path with its query string.
PATH_BYTES = 8 * 1024

#: Characters and tokens of a prompt, new tokens, beams.
PROMPT_CHARACTERS = 16_000
PROMPT_TOKENS = 2_048
NEW_TOKENS = 1_024
BEAMS = 16

#: Runs on one chart; points of one curve; examples behind a cell of the confusion matrix.
PICKED_RUNS = 20
CURVE_POINTS = 1_500
EXAMPLES = 200
#: Examples and tokens that the page Errors evaluates.
EVALUATED_EXAMPLES = 5_000
EVALUATED_TOKENS = 1 << 18
#: Folders of one runs folder that are listed.
LISTED = 2_000

#: Models in memory, and results (inspections, evaluations, tasks) kept for later requests.
MODELS = 2
RESULTS = 32
#: Bytes of all results together; the newest is kept whatever its size.
RESULT_BYTES = 1 << 30
#: Seconds that a request waits for the heavy job before it; then it is told to try again.
PATIENCE_SECONDS = 15.0
RETRY_SECONDS = 1
