"""The best plan over every lawful strategy of a job, and the proof of it."""

#: Wall time after which a search returns the best so far, start-up left out. Assumed: a person waits a minute.
DEFAULT_TIME_LIMIT_S = 50.0
