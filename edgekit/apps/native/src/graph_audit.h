// Checks a graph before ONNX Runtime sees it, by the rules of the onnx target of Python (targets/edgekit_onnx/audit.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace edgekit {

constexpr const char* kWeightsFile = "weights.bin";

struct GraphLimits {
  uint64_t data_bytes;  // of the file of weights
  size_t layers;        // of this graph
  uint64_t positions;   // for which rotary tables must have rows
};

// Refuses a graph with other fields, operators, attributes or weights than the exporter writes, weights outside their
// file, shapes that kernels would trust and should not, and constants that would grow as the graph is loaded. `where` is
// its file, for messages. Throws std::runtime_error.
void audit_graph(const std::string& graph, const std::string& where, const GraphLimits& limits);

}  // namespace edgekit
