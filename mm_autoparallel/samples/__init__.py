"""What one sample of a multimodal data set holds, and what encoder and decoder take for it."""
