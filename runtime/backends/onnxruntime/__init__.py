"""ONNX Runtime on every provider: phases in `backend`, what differs in the other modules."""
