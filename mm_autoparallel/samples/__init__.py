"""What one sample of a multimodal data set holds and costs, and the samples of a data set as columns: read from files,
drawn from distributions, counted, dealt to micro-batches in the order in which they come."""
