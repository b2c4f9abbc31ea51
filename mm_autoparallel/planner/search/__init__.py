"""The best plan over every lawful strategy of a job, and the proof of it."""
