"""A step as operators that were not run: from a module, an execution trace or an ONNX file, to a task graph."""
