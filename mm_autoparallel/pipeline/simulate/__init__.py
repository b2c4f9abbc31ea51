"""The step of a pipeline, played: the compiled engine, its critical path, memory over time, and the chance to fit."""
