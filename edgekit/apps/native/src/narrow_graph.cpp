#include "narrow_graph.h"

#include <functional>
#include <set>
#include <vector>

#include "errors.h"
#include "onnx_fields.h"
#include "onnxruntime.h"
#include "protobuf.h"

namespace edgekit {
namespace {

using namespace onnx;

constexpr uint64_t kWhole = 2, kText = 3;  // kinds of attributes

constexpr const char* kAttention = "GroupQueryAttention";
// Inputs of attention that a graph has in float32: queries, keys, values and rotary tables.
constexpr size_t kWideInputs[] = {0, 1, 2, 7, 8};
// The inputs before the steps; position ids, a bias and a sink among them, which these graphs do not have.
constexpr size_t kInputsBeforeSteps = 12;

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// An input or output of a graph, whose numbers are of this kind where it belongs to the cache.
std::string with_kind(std::string_view value, Number kind) {
  const std::string name = text_of(value, kValueName);
  const bool is_cache = starts_with(name, "past.") || starts_with(name, "present.");
  if (!is_cache || !(ends_with(name, ".key") || ends_with(name, ".value"))) return std::string(value);
  return replaced_in(value, kValueType, [&](std::string_view type) {
    return replaced_in(type, kTypeTensor, [&](std::string_view tensor) {
      std::string made;
      add_number(made, kTypeTensorNumber, static_cast<uint64_t>(kind));
      for (const ProtobufField& each : protobuf_fields(tensor)) {
        if (each.number != kTypeTensorNumber) made += each.written;
      }
      return made;
    });
  });
}

std::string input_of_floats(const std::string& name) {
  std::string tensor, type, value;
  add_number(tensor, kTypeTensorNumber, static_cast<uint64_t>(Number::kFloat));
  add_bytes(type, kTypeTensor, tensor);
  add_bytes(value, kValueName, name);
  add_bytes(value, kValueType, type);
  return value;
}

std::string whole_attribute(const char* name, uint64_t value) {
  std::string made;
  add_bytes(made, kAttributeName, name);
  add_number(made, kAttributeWhole, value);
  add_number(made, kAttributeType, kWhole);
  return made;
}

std::string text_attribute(const char* name, const char* value) {
  std::string made;
  add_bytes(made, kAttributeName, name);
  add_bytes(made, kAttributeText, value);
  add_number(made, kAttributeType, kText);
  return made;
}

// The fields of a node without some attributes, which a graph that was saved by ONNX Runtime has.
std::string without_attributes(std::string_view fields, const std::set<std::string>& names) {
  std::string made;
  for (const ProtobufField& each : protobuf_fields(fields)) {
    if (each.number != kNodeAttribute || names.count(text_of(each.content, kAttributeName)) == 0) made += each.written;
  }
  return made;
}

std::string cast(const std::string& from, const std::string& to, const std::string& name, Number kind) {
  std::string made;
  add_bytes(made, kNodeInput, from);
  add_bytes(made, kNodeOutput, to);
  add_bytes(made, kNodeName, name);
  add_bytes(made, kNodeKind, "Cast");
  add_bytes(made, kNodeAttribute, whole_attribute("to", static_cast<uint64_t>(kind)));
  return made;
}

// A node in parts; `rest` are the fields that are neither inputs nor outputs.
struct Node {
  explicit Node(std::string_view message) {
    for (const ProtobufField& each : protobuf_fields(message)) {
      if (each.number == kNodeInput) inputs.emplace_back(each.content);
      else if (each.number == kNodeOutput) outputs.emplace_back(each.content);
      else rest += each.written;
    }
    if (outputs.empty()) refuse("a graph is damaged: its attention has no output");
  }

  std::string message() const {
    std::string made;
    for (const std::string& each : inputs) add_bytes(made, kNodeInput, each);
    for (const std::string& each : outputs) add_bytes(made, kNodeOutput, each);
    return made + rest;
  }

  std::vector<std::string> inputs, outputs;
  std::string rest;
};

// The change of one graph: nodes in the place of each attention, and further inputs.
struct Change {
  Number kind;
  std::function<std::vector<std::string>(Node)> nodes;
  std::function<std::vector<std::string>()> more_inputs = [] { return std::vector<std::string>(); };
};

std::string changed_graph(std::string_view graph, const Change& change) {
  std::string made;
  for (const ProtobufField& each : protobuf_fields(graph)) {
    if (each.number == kGraphNode && text_of(each.content, kNodeKind) == kAttention) {
      for (const std::string& node : change.nodes(Node(each.content))) add_bytes(made, kGraphNode, node);
    } else if (each.number == kGraphInput || each.number == kGraphOutput) {
      add_bytes(made, each.number, with_kind(each.content, change.kind));
    } else {
      made += each.written;
    }
  }
  for (const std::string& each : change.more_inputs()) add_bytes(made, kGraphInput, each);
  return made;
}

std::string changed_model(const std::string& model, const Change& change) {
  return replaced_in(model, kModelGraph, [&](std::string_view graph) { return changed_graph(graph, change); });
}

}  // namespace

std::string with_float_cache(const std::string& graph) {
  return changed_model(graph, {Number::kFloat, [](const Node& node) { return std::vector{node.message()}; }});
}

std::string with_half_cache(const std::string& graph) {
  std::set<std::string> known;  // that were cast before, since layers share their rotary tables
  return changed_model(graph, {Number::kHalf, [&](Node node) {
    std::vector<std::string> made;
    for (const size_t place : kWideInputs) {
      if (place >= node.inputs.size() || node.inputs[place].empty()) continue;
      const std::string wide = node.inputs[place], half = wide + ".half";
      if (known.insert(half).second) made.push_back(cast(wide, half, half, Number::kHalf));
      node.inputs[place] = half;
    }
    const std::string output = node.outputs[0];
    node.outputs[0] += ".half";
    made.push_back(node.message());
    made.push_back(cast(node.outputs[0], output, output + ".wide", Number::kFloat));
    return made;
  }});
}

std::string with_int8_cache(const std::string& graph) {
  std::vector<std::string> added;
  std::set<std::string> known;  // several layers may read one cache
  Change change{Number::kInt8, [&](Node node) {
    std::string layer;
    for (const std::string& each : node.inputs) {
      const bool is_key = starts_with(each, "past.") && ends_with(each, ".key") && each.size() > 9;
      if (is_key) layer = each.substr(5, each.size() - 9);
    }
    if (layer.empty() || node.inputs.size() > kInputsBeforeSteps)
      refuse("a graph is damaged: its attention has no cache, or other inputs than edgekit writes");
    node.inputs.resize(kInputsBeforeSteps);
    for (const char* kind : {".key", ".value"}) {
      node.inputs.push_back("step." + layer + kind);
      if (known.insert(node.inputs.back()).second) added.push_back(input_of_floats(node.inputs.back()));
    }
    node.rest = without_attributes(node.rest, {"k_quant_type", "v_quant_type", "kv_cache_bit_width"});
    for (const char* name : {"k_quant_type", "v_quant_type"})
      add_bytes(node.rest, kNodeAttribute, text_attribute(name, "PER_CHANNEL"));
    add_bytes(node.rest, kNodeAttribute, whole_attribute("kv_cache_bit_width", 8));
    return std::vector{node.message()};
  }};
  change.more_inputs = [&] { return added; };
  return changed_model(graph, change);
}

}  // namespace edgekit
