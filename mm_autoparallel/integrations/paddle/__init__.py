"""Arguments of PaddleFormers 1.2 and PaddleNLP 3.0, read and written."""
