"""TrainingError: what is the user's to mend, and ends the script with one paragraph and exit code 2."""

from __future__ import annotations


class TrainingError(Exception):
    """Training cannot begin as asked, or cannot go on; the message says what would be right."""
