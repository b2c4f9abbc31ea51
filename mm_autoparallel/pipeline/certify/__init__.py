"""Proofs of placements, and a second opinion: certificates, and checkers of them that share no solver."""
