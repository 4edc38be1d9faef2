"""The onnx target."""
