"""What one sample of a multimodal data set holds and costs: images, text, audio, and the times of encoder and decoder."""
