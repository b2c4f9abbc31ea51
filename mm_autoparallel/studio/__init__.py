"""The studio: a local page on which a person changes a plan or its job and sees at once what that does."""
