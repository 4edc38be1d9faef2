// The native library's audit and change of a graph, as a function that Python calls.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "graph_audit.h"
#include "narrow_graph.h"

// The size of the graph with a cache of 16 or 8 bits, of which the first `capacity` bytes are written; -1: refused, and
// `out` holds the reason.
extern "C" __attribute__((visibility("default"))) long narrow(const char* data, size_t bytes, int bits, char* out,
                                                              size_t capacity) {
  std::string made;
  long size = -1;
  try {
    const std::string graph(data, bytes);
    edgekit::audit_graph(graph, "a graph", {uint64_t{1} << 40, 1024, 1});
    made = bits == 16 ? edgekit::with_half_cache(graph) : edgekit::with_int8_cache(graph);
    size = static_cast<long>(made.size());
  } catch (const std::runtime_error& error) {
    made = error.what();
    made += '\0';
  }
  std::copy_n(made.begin(), std::min(made.size(), capacity), out);
  return size;
}
