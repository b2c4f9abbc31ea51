"""Proofs of placements, and a second opinion: certificates, checkers of them that share no solver, an oracle."""
