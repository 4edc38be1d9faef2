// The operators of the domain `edgekit`, which onnxruntime loads with `RegisterCustomOps`.
#include <algorithm>
#include <initializer_list>
#include <mutex>

#include "operator.h"

namespace edgekit {

std::atomic<const Path*> chosen{path_named("")};

std::string shown(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t each : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(each);
  return text + "]";
}

namespace {

enum Input { kActivations, kValues, kScales, kZeros, kOrder, kBias, kOffsets, kInputs };
constexpr size_t kOfWeights = kInputs - kValues;  // inputs; those of a product of gates stand before the others
constexpr int64_t kMostSize = 1 << 26;     // outputs or inputs of a product
constexpr size_t kPieceBytes = 32 << 10;   // of weights: least work for which a thread is asked
constexpr size_t kPieceInputs = 16 << 10;  // that are rounded at once

class ProductNode : public Node {
 public:
  ProductNode(const CustomOp& op, const Api& api, const void* info)
      : Node("Product", api, info), is_gated_(op.input_count(&op) > kInputs) {
    if (is_gated_) read(info, 0, gates_);
    read(info, is_gated_ ? kOfWeights : 0, weights_);
    require(!is_gated_ || !gates_.zeros == !weights_.zeros, "one of two products has zero_points");
  }

  void compute(void* context) const {
    const Tensor input = this->input(context, kActivations);
    const int64_t width = input.shape.empty() ? 0 : input.shape.back();
    require(input.element == kFloat && width == static_cast<int64_t>(weights_.inputs),
            "A has the shape " + shown(input.shape) + ", its last size must be K = " + std::to_string(weights_.inputs));
    std::vector<int64_t> shape = input.shape;
    shape.back() = static_cast<int64_t>(weights_.outputs);
    size_t count = 1;
    for (size_t i = 0; i + 1 < shape.size(); i++) count *= static_cast<size_t>(shape[i]);
    auto* written = output<float>(context, 0, shape);
    if (count == 0) return;

    const size_t padded = weights_.padded(), blocks = weights_.blocks;
    const size_t row_bytes = padded + blocks * (2 * sizeof(float) + sizeof(int32_t));
    require(count <= std::numeric_limits<size_t>::max() / row_bytes - kTurned,
            "A has too many rows: " + shown(input.shape));
    const size_t turned = (count + kTurned - 1) / kTurned * kTurned * blocks;
    const Scratch scratch(*this, (count + kTurned) * row_bytes);
    auto* scales = static_cast<float*>(scratch.data) + turned;
    auto* mends = reinterpret_cast<int32_t*>(scales + count * blocks);
    auto* values = reinterpret_cast<int8_t*>(mends + count * blocks);
    const Rows rows = {values, scales, mends, scales - turned, padded, blocks};
    run(context, {chosen.load(), &weights_, is_gated_ ? &gates_ : nullptr, static_cast<const float*>(input.data), rows,
                  count, written});
  }

  Status* status_of_compute(void* context) const {
    return api_.status_of([&] { compute(context); });
  }

 private:
  // A product in pieces: each is some rows times some bands of outputs.
  struct Pieces {
    Product product;
    size_t rows, bands;      // of a piece
    size_t across;           // pieces of one group of rows
  };

  // Reads the weights whose inputs stand `shift` after those of a lone product.
  void read(const void* info, size_t shift, Weights& to) const {
    const int64_t inputs = size(info, "K", kMostSize), outputs = size(info, "N", kMostSize);
    const int64_t bits = api_.attribute(info, "bits"), block = api_.attribute(info, "block_size");
    require(bits == 4 || bits == 8, "bits is " + std::to_string(bits) + ", it must be 4 or 8");
    require(block == 16 || block == 32 || block == 64 || block == 128,
            "block_size is " + std::to_string(block) + ", it must be 16, 32, 64 or 128");
    const bool is_packed = attribute<int64_t>(info, "packed", 0) != 0;
    to.outputs = outputs, to.inputs = inputs;
    to.bits = static_cast<int>(bits), to.block = static_cast<int>(block);
    const int64_t blocks = to.blocks = (inputs + block - 1) / block;
    const int64_t bands = to.bands(), band_bytes = to.band_bytes();
    using Shape = std::vector<int64_t>;
    const void* values = constant(info, shift + kValues, "B", {kUInt8},
                                  is_packed ? Shape{bands, band_bytes} : Shape{outputs, blocks, block * bits / 8}).data;
    const Tensor scales = is_packed ? constant(info, shift + kScales, "scales", {kFloat, kHalf}, {bands, blocks, kWide})
                                    : constant(info, shift + kScales, "scales", {kFloat}, {outputs, blocks});
    const auto* zeros = static_cast<const uint8_t*>(
        constant(info, shift + kZeros, "zero_points", {kUInt8}, {outputs, (blocks * bits + 7) / 8}).data);
    const auto* bias = static_cast<const float*>(constant(info, shift + kBias, "bias", {kFloat}, {outputs}).data);
    require(values && scales.data, "B or scales are missing");
    require(!has_input(info, shift + kOrder), "g_idx is not supported, the graph must not have it");
    const Shape of_blocks = is_packed ? Shape{bands, blocks, kWide} : Shape{outputs, blocks};
    const auto* offsets =
        static_cast<const uint16_t*>(constant(info, shift + kOffsets, "offsets", {kHalf}, of_blocks).data);
    require(!is_packed || !zeros, "packed weights have no zero_points");
    if (bias) to.bias.assign(bias, bias + outputs);
    if (is_packed) {
      to.values = static_cast<const uint8_t*>(values);
      to.scales = scales.data;
      to.halves = scales.element == kHalf;
      to.offsets = offsets;
    } else {
      pack(static_cast<const uint8_t*>(values), static_cast<const float*>(scales.data), zeros, offsets, to);
    }
  }

  bool has_input(const void* info, size_t input) const {
    size_t count = 0, letters = 0;  // with the null at the end
    api_.check(kGetInputCount, info, &count);
    if (input >= count) return false;
    api_.check(kGetInputName, info, input, static_cast<char*>(nullptr), &letters);
    return letters > 1;
  }

  // An input that the graph holds, whose data stays while the session is open; without data where it is absent.
  Tensor constant(const void* info, size_t input, const std::string& name, std::initializer_list<int> elements,
                  const std::vector<int64_t>& expected) const {
    if (!has_input(info, input)) return {};
    int is_constant = 0;
    const void* value = nullptr;
    api_.check(kGetConstantInput, info, input, &is_constant, &value);
    require(is_constant && value, name + " must be a constant of the graph");
    Tensor tensor = api_.tensor(value);
    require(std::count(elements.begin(), elements.end(), tensor.element) == 1,
            name + " has numbers of the type " + std::to_string(tensor.element));
    require(tensor.shape == expected,
            name + " has the shape " + shown(tensor.shape) + ", the attributes ask for " + shown(expected));
    return tensor;
  }

  void run(void* context, const Product& product) const {
    const size_t bands = weights_.bands(), count = product.count;
    Pieces pieces{product, std::max<size_t>(1, kPieceInputs / weights_.inputs), bands, 1};
    if (count <= pieces.rows) {
      product.quantise(0, count);
    } else {
      parallel(context, (count + pieces.rows - 1) / pieces.rows, pieces, [](void* given, size_t index) {
        const Pieces& all = *static_cast<const Pieces*>(given);
        all.product.quantise(index * all.rows, std::min((index + 1) * all.rows, all.product.count));
      });
    }
    pieces.rows = std::min(count, kPieceRows);
    pieces.bands = std::max<size_t>(1, kPieceBytes / (weights_.band_bytes() * std::min(count, kPieceRows)));
    pieces.across = (bands + pieces.bands - 1) / pieces.bands;
    const size_t down = (count + pieces.rows - 1) / pieces.rows;
    parallel(context, pieces.across * down, pieces, [](void* given, size_t index) {
      const Pieces& all = *static_cast<const Pieces*>(given);
      const Product& product = all.product;
      const size_t first = index / all.across * all.rows, band = index % all.across * all.bands;
      for (size_t each = band; each < std::min(band + all.bands, product.weights->bands()); each++)
        product.multiply(each, first, std::min(first + all.rows, product.count));
    });
  }

  bool is_gated_;
  Weights weights_, gates_;
};

// A product; `kGated`: times the activated gates, which are a second product of the same activations.
template <bool kGated>
struct ProductOp : NodeOp {
  ProductOp() {
    runs<ProductNode>();
    name = [](const CustomOp*) { return kGated ? "GatedProduct" : "Product"; };
    input_count = [](const CustomOp*) { return kInputs + (kGated ? kOfWeights : 0); };
    input_type = [](const CustomOp*, size_t index) -> int {
      const size_t of_one = index >= kInputs ? index - kOfWeights : index;
      if (of_one == kScales) return kUndefined;  // any, which the kernel checks
      if (of_one == kOffsets) return kHalf;
      return of_one == kOrder ? kInt32 : of_one == kValues || of_one == kZeros ? kUInt8 : kFloat;
    };
    input_presence = [](const CustomOp*, size_t index) -> int {
      return (index >= kInputs ? index - kOfWeights : index) < kZeros ? kRequired : kOptional;
    };
    output_count = [](const CustomOp*) { return size_t{1}; };
    output_type = [](const CustomOp*, size_t) -> int { return kFloat; };
  }
};

}  // namespace
}  // namespace edgekit

extern "C" {

// Takes the fastest path that this processor has, or the named one for tests; returns its name, null if it has none.
__attribute__((visibility("default"))) const char* edgekit_kernels_path(const char* name) {
  const edgekit::Path* path = edgekit::path_named(name);
  if (path == nullptr) return nullptr;
  edgekit::chosen = path;
  return path->name;
}

struct OrtApiBase {
  const void* (*api)(uint32_t version);
  const char* (*version)();
};

__attribute__((visibility("default"))) edgekit::Status* RegisterCustomOps(void* options, const OrtApiBase* base) {
  using namespace edgekit;
  static const ProductOp<false> product;
  static const ProductOp<true> gated;
  static void* domain = nullptr;  // one for all sessions, which only read it
  static std::mutex mutex;
  const Api api(base->api(kApiVersion));
  return api.status_of([&] {
    const std::lock_guard<std::mutex> lock(mutex);
    if (domain == nullptr) {
      api.check(kCreateCustomOpDomain, "edgekit", &domain);
      api.check(kAddToDomain, domain, static_cast<const CustomOp*>(&product));
      api.check(kAddToDomain, domain, static_cast<const CustomOp*>(&gated));
      for (const CustomOp* attention : attention_operators()) api.check(kAddToDomain, domain, attention);
    }
    api.check(kAddCustomOpDomain, options, domain);
  });
}
}
