"""Programs that show a run's numbers beside its log: TensorBoard, and Weights & Biases."""
