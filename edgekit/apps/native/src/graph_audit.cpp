#include "graph_audit.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "errors.h"
#include "numbers.h"
#include "onnx_fields.h"
#include "protobuf.h"

namespace edgekit {
namespace {

using Kind = ProtobufField::Kind;
using Shape = std::vector<uint64_t>;

constexpr uint64_t kMostInlineBytes = 4096, kMostFoldedItems = 4096, kMostRank = 8;
constexpr size_t kMostNodesALayer = 80, kMostOtherNodes = 256;
constexpr size_t kMostDimensions = 3, kMostDigits = 19;
constexpr uint64_t kUint8 = 2, kInt64 = 7;  // onnx.TensorProto's numbers
constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// Python's list without the operators of encoders, experts and recurrent layers, which this library does not run.
const std::set<std::string_view> kOperators = {
    "Add", "Cast", "Concat", "Div", "Exp", "Expand", "FusedMatMul", "Gather", "GatherBlockQuantized", "Gelu",
    "GroupQueryAttention", "LayerNormalization", "MatMulNBits", "Mul", "Neg", "QuickGelu", "Range", "ReduceLogSumExp",
    "ReduceSum", "Relu", "Reshape", "RotaryEmbedding", "Shape", "Sigmoid", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Slice", "Softmax", "Split", "Sub", "Tanh",
    "Unsqueeze",
};

using namespace onnx;

// The kinds of the fields in onnx.proto that the exporter writes; any other is refused. A parser skips a field of
// another kind than its number has, and would then read another graph than this audit.
using Fields = std::map<uint32_t, Kind>;
const Fields kModelFields = {  // with a version and the producer
    {1, Kind::kNumber}, {2, Kind::kBytes}, {kModelGraph, Kind::kBytes}, {kModelOperators, Kind::kBytes}};
const Fields kOperatorsFields = {{kOperatorsDomain, Kind::kBytes}, {2, Kind::kNumber}};
const Fields kGraphFields = {  // with a name and shapes of values
    {kGraphNode, Kind::kBytes},  {2, Kind::kBytes},            {kGraphTensor, Kind::kBytes},
    {kGraphInput, Kind::kBytes}, {kGraphOutput, Kind::kBytes}, {13, Kind::kBytes}};
const Fields kValueFields = {{kValueName, Kind::kBytes}, {kValueType, Kind::kBytes}};
const Fields kNodeFields = {{kNodeInput, Kind::kBytes}, {kNodeOutput, Kind::kBytes},    {kNodeName, Kind::kBytes},
                            {kNodeKind, Kind::kBytes},  {kNodeAttribute, Kind::kBytes}, {kNodeDomain, Kind::kBytes}};
const Fields kAttributeFields = {  // with a float
    {kAttributeName, Kind::kBytes}, {2, Kind::kFourBytes}, {kAttributeWhole, Kind::kNumber},
    {kAttributeText, Kind::kBytes}, {kAttributeType, Kind::kNumber}};
const Fields kTensorFields = {{kTensorDims, Kind::kNumber},    {kTensorType, Kind::kNumber},
                              {kTensorName, Kind::kBytes},     {kTensorBytes, Kind::kBytes},
                              {kTensorExternal, Kind::kBytes}, {kTensorPlace, Kind::kNumber}};
const Fields kEntryFields = {{kEntryKey, Kind::kBytes}, {kEntryValue, Kind::kBytes}};
constexpr size_t kSinks = 11;  // place of learnt logits among the inputs of attention, which only experts have

// A stored tensor, or one computed from stored ones, whose shape kernels trust.
struct Stored {
  uint64_t kind;
  Shape shape;
  std::optional<std::vector<int64_t>> values;  // of whole numbers in the graph itself
};

// What is known of a value: the operator that computes it, and the most items that loading may compute of it.
struct Known {
  std::string made_by;
  std::optional<double> folded;  // none: known when the graph runs
};

double product_of(const Shape& shape) {
  double found = 1;
  for (const uint64_t each : shape) found *= static_cast<double>(each);
  return found;
}

uint64_t rounded_up(uint64_t count, uint64_t by) { return count / by + (count % by != 0); }

class Audit {
 public:
  Audit(std::string where, const GraphLimits& limits) : where_(std::move(where)), limits_(limits) {}

  void check(std::string_view model) {
    std::string_view graph;
    size_t graphs = 0;
    std::multiset<std::string> domains;
    for (const ProtobufField& each : fields(model, kModelFields)) {
      if (each.number == kModelGraph) graph = each.content, ++graphs;
      if (each.number == kModelOperators) domains.insert(text_of(each.content, kOperatorsFields, kOperatorsDomain));
    }
    if (graphs != 1) refuse_graph("holds " + std::to_string(graphs) + " graphs");  // several would be merged
    if (domains != std::multiset<std::string>{"", "com.microsoft"})
      refuse_graph("uses operators of other domains, or does not state them");
    const std::vector<ProtobufField> parts = fields(graph, kGraphFields);
    for (const ProtobufField& each : parts) {
      if (each.number == kGraphTensor) add_tensor(each.content);
      if (each.number == kGraphInput) known_[text_of(each.content, kValueFields, kValueName)] = {"input", std::nullopt};
    }
    size_t nodes = 0;
    for (const ProtobufField& each : parts) {
      if (each.number == kGraphNode) check_node(each.content), ++nodes;
    }
    if (nodes > limits_.layers * kMostNodesALayer + kMostOtherNodes)
      refuse_graph("has " + std::to_string(nodes) + " nodes for " + std::to_string(limits_.layers) + " layers");
    if (!expanded_.empty()) refuse_graph("expands " + quote_short(*expanded_.begin()) + ", which no product reads");
  }

 private:
  struct Node {
    std::string name, kind, domain;
    std::vector<std::string> inputs, outputs;
    std::map<std::string, uint64_t> options;  // those that are whole numbers

    uint64_t option(const char* name) const {
      const auto found = options.find(name);
      return found == options.end() ? 0 : found->second;
    }
    const std::string& input(size_t place) const {
      static const std::string none;
      return place < inputs.size() ? inputs[place] : none;
    }
  };

  [[noreturn]] void refuse_graph(const std::string& what) const {
    refuse(where_ + ": " + what + "; it was not written by this exporter: export again");
  }

  [[noreturn]] void refuse_node(const Node& node, const std::string& what) const {
    refuse_graph(node.kind + " " + quote_short(node.name) + " " + what);
  }

  std::vector<ProtobufField> fields(std::string_view message, const Fields& allowed) const {
    std::vector<ProtobufField> found = protobuf_fields(message);
    for (const ProtobufField& each : found) {
      const auto kind = allowed.find(each.number);
      if (kind == allowed.end() || kind->second != each.kind)
        refuse_graph("holds the field " + std::to_string(each.number) + ", which this exporter does not write");
    }
    return found;
  }

  // A text that stands once: a parser would take the last one.
  std::string text_of(std::string_view message, const Fields& allowed, uint32_t number) const {
    std::string found;
    size_t count = 0;
    for (const ProtobufField& each : fields(message, allowed)) {
      if (each.number == number) found = each.content, ++count;
    }
    if (count > 1) refuse_graph("says a name twice");
    return found;
  }

  void add_tensor(std::string_view message) {
    Stored made{0, {}, std::nullopt};
    std::string_view bytes;
    std::map<std::string, std::string> entries;
    size_t entry_count = 0;
    uint64_t place = 0;
    for (const ProtobufField& each : fields(message, kTensorFields)) {
      if (each.number == kTensorDims) made.shape.push_back(each.value);
      if (each.number == kTensorType) made.kind = each.value;
      if (each.number == kTensorPlace) place = each.value;
      if (each.number == kTensorBytes) bytes = each.content;
      if (each.number == kTensorExternal) {
        ++entry_count;
        entries[text_of(each.content, kEntryFields, kEntryKey)] = text_of(each.content, kEntryFields, kEntryValue);
      }
    }
    const std::string name = text_of(message, kTensorFields, kTensorName);
    const uint64_t item_bytes = bytes_of_kind(made.kind);
    const bool has_shape = made.shape.size() <= kMostDimensions &&
                           std::all_of(made.shape.begin(), made.shape.end(), [](uint64_t size) {
                             return size >= 1 && size < uint64_t{1} << 40;
                           });
    const double needed = product_of(made.shape) * static_cast<double>(item_bytes);
    if (name.empty() || stored_.count(name) != 0 || item_bytes == 0 || !has_shape)
      refuse_graph("tensor " + quote_short(name) + " occurs twice, or has no name, no known type or no shape");
    if (place == 1) {
      if (!bytes.empty() || !is_in_file(entries, entry_count, needed))
        refuse_graph("tensor " + quote_short(name) + " is not a range of " + kWeightsFile + " with its bytes");
    } else if (place != 0 || entry_count != 0 || static_cast<double>(bytes.size()) != needed ||
               bytes.size() > kMostInlineBytes) {
      refuse_graph("tensor " + quote_short(name) + " does not hold the bytes of its shape");
    } else if (made.kind == kInt64) {
      made.values.emplace(bytes.size() / sizeof(int64_t));
      if (!bytes.empty()) std::memcpy(made.values->data(), bytes.data(), bytes.size());
    }
    std::string kind = "constant";
    if (made.values == std::vector<int64_t>{0}) kind = "zero";
    if (made.values == std::vector<int64_t>{1}) kind = "one";
    known_[name] = {kind, product_of(made.shape)};
    stored_[name] = std::move(made);
  }

  static uint64_t bytes_of_kind(uint64_t kind) {
    switch (kind) {
      case static_cast<uint64_t>(Number::kFloat): return 4;
      case static_cast<uint64_t>(Number::kInt32): return 4;
      case static_cast<uint64_t>(Number::kHalf): return 2;
      case kUint8: return 1;
      case kInt64: return 8;
      default: return 0;
    }
  }

  bool is_in_file(const std::map<std::string, std::string>& entries, size_t count, double needed) const {
    if (count != 3 || entries.size() != 3) return false;
    const auto location = entries.find("location"), offset = entries.find("offset"), length = entries.find("length");
    if (location == entries.end() || offset == entries.end() || length == entries.end()) return false;
    for (const auto* each : {&offset->second, &length->second}) {
      const bool is_number = !each->empty() && each->size() < kMostDigits &&
                             each->find_first_not_of("0123456789") == std::string::npos;
      if (!is_number) return false;
    }
    const uint64_t begin = std::stoull(offset->second), bytes = std::stoull(length->second);
    return location->second == kWeightsFile && static_cast<double>(bytes) == needed && bytes <= limits_.data_bytes &&
           begin <= limits_.data_bytes - bytes;
  }

  void check_node(std::string_view message) {
    Node node{text_of(message, kNodeFields, kNodeName),
              text_of(message, kNodeFields, kNodeKind),
              text_of(message, kNodeFields, kNodeDomain),
              {},
              {},
              {}};
    for (const ProtobufField& each : fields(message, kNodeFields)) {
      if (each.number == kNodeInput) node.inputs.emplace_back(each.content);
      if (each.number == kNodeOutput) node.outputs.emplace_back(each.content);
      if (each.number == kNodeAttribute) add_option(node, each.content);
    }
    if (kOperators.count(node.kind) == 0 || !(node.domain.empty() || node.domain == "com.microsoft"))
      refuse_graph("uses the operator " + quote_short(node.domain) + " " + quote_short(node.kind));
    const bool is_of_scales = stored_.count(node.input(0)) != 0;
    if (node.kind == "Expand" || (node.kind == "Cast" && is_of_scales)) check_scales(node);
    if (node.kind == "MatMulNBits") check_product(node);
    if (node.kind == "GatherBlockQuantized") check_lookup(node);
    if (node.kind == "GroupQueryAttention") check_attention(node);
    check_folding(node);
  }

  void add_option(Node& node, std::string_view message) const {
    uint64_t type = 0, value = 0;
    for (const ProtobufField& each : fields(message, kAttributeFields)) {
      if (each.number == kAttributeType) type = each.value;
      if (each.number == kAttributeWhole) value = each.value;
    }
    if (type < 1 || type > 3) refuse_node(node, "carries more than plain attributes");
    node.options[text_of(message, kAttributeFields, kAttributeName)] = value;
  }

  const Stored* stored(const std::string& name) const {
    const auto found = stored_.find(name);
    return found == stored_.end() ? nullptr : &found->second;
  }

  bool is_stored(const std::string& name, uint64_t kind, const Shape& shape) const {
    const Stored* found = stored(name);
    return found != nullptr && found->kind == kind && found->shape == shape;
  }

  // Scales as floats, or one of each row repeated for its blocks: notes their type and shape.
  void check_scales(const Node& node) {
    const Stored* scales = stored(node.input(0));
    Stored made = scales == nullptr ? Stored{0, {}, std::nullopt} : *scales;
    made.values.reset();
    if (node.outputs.size() != 1) refuse_node(node, "has several results");
    if (node.kind == "Cast") {
      made.kind = node.option("to");
    } else {
      const Stored* sizes = node.inputs.size() == 2 ? stored(node.input(1)) : nullptr;
      const bool is_one_a_row = sizes != nullptr && sizes->values && !made.shape.empty() && made.shape.back() == 1 &&
                                sizes->values->size() == made.shape.size() && sizes->values->back() >= 1;
      if (!is_one_a_row) refuse_node(node, "does not repeat one scale of each row");
      Shape wide(sizes->values->begin(), sizes->values->end());
      if (!std::equal(wide.begin(), wide.end() - 1, made.shape.begin()))
        refuse_node(node, "does not repeat one scale of each row");
      made.shape = std::move(wide);
      expanded_.insert(node.outputs[0]);
    }
    stored_[node.outputs[0]] = std::move(made);
  }

  // Attributes must agree with the weights' shapes, because the kernel trusts them.
  void check_product(const Node& node) {
    const uint64_t outputs = node.option("N"), inputs = node.option("K"), bits = node.option("bits"),
                   block = node.option("block_size");
    const bool has_block = block == 16 || block == 32 || block == 64 || block == 128 || block == 256;
    if ((bits != 4 && bits != 8) || !has_block || outputs < 1 || inputs < 1)
      refuse_node(node, "has other attributes than products have");
    const uint64_t blocks = rounded_up(inputs, block), kFloat = static_cast<uint64_t>(Number::kFloat);
    const bool fits = is_stored(node.input(1), kUint8, {outputs, blocks, block * bits / 8}) &&
                      is_stored(node.input(2), kFloat, {outputs, blocks}) && node.inputs.size() <= 6 &&
                      node.input(3).empty() && node.input(4).empty() &&
                      (node.inputs.size() < 6 || is_stored(node.input(5), kFloat, {outputs}));
    if (!fits) refuse_node(node, "does not fit its weights");
    expanded_.erase(node.input(2));
  }

  void check_lookup(const Node& node) const {
    const uint64_t bits = node.option("bits"), block = node.option("block_size");
    const Stored *table = stored(node.input(0)), *scales = stored(node.input(2));
    if ((bits != 4 && bits != 8) || block < 16 || (block & (block - 1)) != 0 || node.inputs.size() != 3)
      refuse_node(node, "has other attributes than lookups have");
    const bool fits = table != nullptr && scales != nullptr && table->kind == kUint8 && table->shape.size() == 2 &&
                      scales->kind == static_cast<uint64_t>(Number::kFloat) &&
                      scales->shape == Shape{table->shape[0], rounded_up(table->shape[1] * 8 / bits, block)};
    if (!fits) refuse_node(node, "does not fit its table");
  }

  // Rotary tables must have a row for every position: the kernel would read past their end.
  void check_attention(const Node& node) const {
    if (!node.input(kSinks).empty()) refuse_node(node, "has sinks");
    if (node.option("do_rotary") == 0) return;
    for (const size_t place : {size_t{7}, size_t{8}}) {
      const Stored* table = stored(node.input(place));
      if (table == nullptr || table->kind != static_cast<uint64_t>(Number::kFloat) || table->shape.size() != 2 ||
          table->shape[0] < limits_.positions)
        refuse_node(node, "has no rotary table of " + std::to_string(limits_.positions) + " positions");
    }
  }

  // Bounds what ONNX Runtime computes from constants and known shapes as it loads: bytes could become gigabytes.
  void check_folding(const Node& node) {
    std::vector<const Known*> operands;
    for (const std::string& name : node.inputs) {
      if (name.empty()) continue;
      const auto found = known_.find(name);
      if (found == known_.end()) refuse_node(node, "takes what no node before it computes");
      operands.push_back(&found->second);
    }
    const bool counts_axis = operands.size() == 3 && operands[0]->made_by == "zero" && operands[1]->made_by == "axis" &&
                             operands[2]->made_by == "one";
    if (node.kind == "Range" && !counts_axis) refuse_node(node, "does not count an axis");
    // A result of one operand is no larger than it, one of several at most the product.
    std::optional<double> most = 1;
    for (const Known* each : operands) {
      if (!most || !each->folded) most.reset();
      else *most *= operands.size() == 1 ? *each->folded : *each->folded + 1;
    }
    if (node.kind == "Shape") {
      most = kMostRank;
    } else if (node.kind == "Range") {
      most = kUnbounded;  // a range has as many items as an axis
    } else if (node.kind == "Expand") {
      most = product_of(stored_.at(node.outputs[0]).shape);  // as large as weights in the file allow
    } else if (operands.size() > 1 && most && *most > kMostFoldedItems) {
      refuse_node(node, "computes too many items from constants alone");
    }
    if (most && *most > kMostFoldedItems && *most < kUnbounded) computed_ += *most;
    if (computed_ > static_cast<double>(limits_.data_bytes))
      refuse_node(node, "and others compute too much from constants alone");
    const bool is_axis = node.kind == "Gather" && !operands.empty() && operands[0]->made_by == "Shape";
    for (const std::string& name : node.outputs) {
      const bool is_new = name.empty() || known_.emplace(name, Known{is_axis ? "axis" : node.kind, most}).second;
      if (!is_new) refuse_node(node, "computes " + quote_short(name) + " once more");
    }
  }

  const std::string where_;
  const GraphLimits limits_;
  std::map<std::string, Stored> stored_;
  std::map<std::string, Known> known_;
  std::set<std::string> expanded_;  // scales for blocks that no product has read yet
  double computed_ = 0;             // items of large values that are computed as the graph is loaded
};

}  // namespace

void audit_graph(const std::string& graph, const std::string& where, const GraphLimits& limits) {
  Audit(where, limits).check(graph);
}

}  // namespace edgekit
