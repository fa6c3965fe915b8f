"""Planted faults in the server and its batching engine: one line each, and the check that notices."""

from tests.checks.faults import Fault

BATCH, REQUEST = "generation.batching:Batcher", "serve.request"
API, ANSWER = "serve.app:_Api", "serve.answers"
KEY, LOGPROB = "serve.app:_Guard.check_secret", "generation.batching:_logprob"

FAULTS = (
    # slots and the queue
    Fault("slots are not freed", f"{BATCH}._release", "held.user, held.used = None, self.steps", "held.used = self.steps", "slots are free again"),
    Fault("a cancelled sequence keeps its slot", f"{BATCH}.cancel", "self._release(sequence)", "pass", "who leaves frees the slot"),
    Fault("a cancelled sequence stays in the queue", f"{BATCH}.cancel", "line.remove(sequence)", "pass", "who leaves frees the slot"),
    Fault("the first owner is always next", f"{BATCH}._admit", "self._queue.move_to_end(owner)", "self._queue.move_to_end(owner, last=False)", "owners take turns"),
    Fault("prompts are read at once", f"{BATCH}._shares", "count = min(user.unread, max(room // left, 1))", "count = user.unread", "long prompts are cut"),
    # whose logits, whose memory
    Fault("the wrong row's logits", f"{BATCH}.step", "logits_RV[end - 1 : end]", "logits_RV[:1]", "alone is together"),
    Fault("another prompt's beginning is reused", "generation.prompts:shared_length", "if list(held[low:middle]) == list(prompt[low:middle]):", "if True:", "alone is together"),
    Fault("the slot forgets what it read", f"{BATCH}._read", "self._held_by(user).ids += span.tokens", "pass", "prompts are read once"),
    Fault("a longer beginning is believed to be there", f"{BATCH}._place", "user.slot, user.read, user.reused = target, shared, shared", "user.slot, user.read, user.reused = target, shared + 1, shared", "prompts are read once"),
    Fault("memory is not copied", f"{BATCH}._place", "self.slots.copy(source, target, length=shared)", "pass", "alone is together"),
    # several steps in one call
    Fault("the slot forgets what it made", f"{BATCH}._greedy_steps", "self._held_by(user).ids.append(user.tokens[-1])", "pass", "prompts are read once"),
    Fault("a run goes on behind an end", f"{BATCH}._greedy_steps", "ends=spec.eos", "ends=()", "several steps at once"),
    Fault("a run makes forbidden tokens", f"{BATCH}._greedy_steps", "closed=spec.forbidden", "closed=()", "several steps at once"),
    Fault("a run takes who samples", "generation.batching:_all_greedy", "and user.spec.greedy", "", "several steps at once"),
    # random numbers
    Fault("a seed for all requests", f"{API}.rows", "seed=generation.seed", "seed=0", "seeds differ"),
    Fault("choices share a seed", f"{API}.rows", "row=choice", "row=0", "choices differ"),
    Fault("a seed that is not given is 0", f"{REQUEST}:_generation", "secrets.randbits(48) if seed is None", "0 if seed is None", "no seed, no repetition"),
    # what is added to logits
    Fault("a penalty counts once", "generation.batching:Shift.taken", "-= self.frequency + (self.presence if is_first else 0.0)", "-= (self.frequency + self.presence) if is_first else 0.0", "penalties"),
    Fault("presence is paid again", "generation.batching:Shift.taken", "(self.presence if is_first else 0.0)", "self.presence", "penalties"),
    Fault("a bias is forgotten", f"{BATCH}._chosen", "shifted_1V = logits_1V.float() + user.shift_1V.to(logits_1V.device)", "pass", "a bias"),
    Fault("log-probabilities of another token", LOGPROB, "logprobs_of(x_1V, [token])", "logprobs_of(x_1V, [token - 1])", "log-probabilities"),
    Fault("log-probabilities after the bias", f"{BATCH}._chosen", "_logprob(logits_1V[0], token", "_logprob(shifted_1V[0], token", "log-probabilities are the model's"),
    # prompts that are scored
    Fault("scores of the token itself", f"{BATCH}._read", "user.prompt[span.start + 1 : span.start + 1 + len(span.tokens)]", "user.prompt[span.start : span.start + len(span.tokens)]", "an echo is one forward"),
    Fault("scored prompts are reused", f"{BATCH}._place", "and user.scores is None", "", "no company changes scores"),
    Fault("the end has no score", f"{ANSWER}:_scored", "if new.token != NOTHING", "if not new.is_end", "an end has its score"),
    Fault("a prompt alone is continued", f"{API}.rows", "is_continued=wanted != 0", "is_continued=True", "an echo is one forward"),
    # answers
    Fault("a stop string is shown", "generation.streaming:RowText.__init__", "StopFilter(spec.stop)", "StopFilter(())", "stop strings"),
    Fault("the end is counted twice", f"{ANSWER}:usage", "made = sum(len(row.tokens) for row in rows)", "made = sum(len(row.tokens) + 1 for row in rows)", "usage"),
    Fault("a prompt counts for every choice", f"{ANSWER}:usage", "for row in prompts.values())\n    made", "for row in rows)\n    made", "usage"),
    Fault("pieces get lost", f"{ANSWER}:Answer.pieces", "by_row.setdefault(id(row), (row, []))[1].append(new)", "by_row[id(row)] = (row, [new])", "streams are complete"),
    Fault("everything is choice 0", f"{ANSWER}:Answer.pieces", "place = self.places[id(row)]", "place = 0", "streams are complete"),
    Fault("a length is a stop", f"{ANSWER}:Style.take", "self.finish[place] = FINISH[finish]", 'self.finish[place] = "stop"', "usage"),
    Fault("who goes away is computed for", f"{ANSWER}:Answer.end", "self.engine.cancel(self.served.name, self.rows)", "pass", "who goes away is dropped"),
    Fault("time is not limited", f"{ANSWER}:Answer.begin", "call_later(self.seconds, self._too_late)", "call_later(3600.0, self._too_late)", "time is limited"),
    # limits
    Fault("the queue has no end", f"{API}.check_room", "if self.engine.waiting(served.name) + count > self.limits.queue + slots:", "if False:", "the queue is bounded"),
    Fault("the beginning of the key is enough", KEY, "hmac.compare_digest(_digest(given.strip()), self._key)", "_digest(given.strip())[:0] == self._key[:0]", "the key"),
    Fault("any scheme carries the key", KEY, 'scheme.lower() != "bearer" or not right', "not right", "the key"),
    Fault("fields may be misspelled", "serve.fields:Fields.only", "if key not in known:", "if False:", "unknown fields"),
    Fault("a stopping server goes on", f"{API}.check_room", "if self.engine.closing or self.engine.failed is not None:", "if False:", "a stop takes no more"),
    Fault("any model does", f"{API}.served", "self.engine.models.get(name)", "next(iter(self.engine.models.values()))", "models by name"),
    # vectors and tools
    Fault("vectors of the first text", f"{API}.embed", "vector = one.vectors[0]", "vector = found[0].vectors[0]", "vectors"),
    Fault("vectors are counted by text", f"{API}.embed", "count = sum(sum(one.tokens) for one in found)", "count = len(found)", "vectors"),
    Fault("any tool will do", f"{REQUEST}:_tool_choice", "return True, (name,)", "return True, names[:1]", "tool choice"),
)  # fmt: skip
