"""The parts that train: the loaded model, the encoded data, adapter and optimizer, and one step over them."""
