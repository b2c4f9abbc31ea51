"""What one sample of a multimodal data set holds and costs: images, text, and the times of encoder and decoder."""
