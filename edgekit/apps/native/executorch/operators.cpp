#include "operators.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

bool is_floats(const Tensor& tensor, int dims) {
  return tensor.scalar_type() == ScalarType::Float && tensor.dim() == dims;
}

// value [1, count, head, dim] goes to cache [1, slot, head, dim] from slot `start` on; of floats, or of 8 bits.
Tensor& update_cache(KernelRuntimeContext& context, const Tensor& value, Tensor& cache, int64_t start, Tensor& out) {
  const bool fits = value.scalar_type() == cache.scalar_type() && value.dim() == 4 && cache.dim() == 4 &&
                    value.size(0) == 1 && cache.size(0) == 1 &&
                    value.size(2) == cache.size(2) && value.size(3) == cache.size(3) && start >= 0 &&
                    start + value.size(1) <= cache.size(1);
  ET_KERNEL_CHECK(context, fits, InvalidArgument, out);
  const int64_t width = value.size(2) * value.size(3) * value.element_size();
  std::memcpy(static_cast<char*>(cache.mutable_data_ptr()) + start * width, value.const_data_ptr(), value.nbytes());
  return out;
}

// Eight sums side by side, which compilers turn into vectors without being allowed to reorder anything.
float dot(const float* one, const float* other, int64_t count) {
  float sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += one[i + lane] * other[i + lane];
  }
  float found = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  for (; i < count; ++i) found += one[i] * other[i];
  return found;
}

struct Shape {
  int64_t count, heads, dim, slots, groups, start;
  bool causal;
  float scale;
};

// One query of one head over all that it sees: scores, softmax, mean of the values.
void attend(const Shape& shape, const float* query, const float* keys, const float* values, const float* mask,
            int64_t seen, std::vector<float>& scores, float* out) {
  const int64_t step = shape.groups * shape.dim;
  float highest = -std::numeric_limits<float>::infinity();
  for (int64_t slot = 0; slot < seen; ++slot) {
    scores[slot] = dot(query, keys + slot * step, shape.dim) * shape.scale + (mask ? mask[slot] : 0.0f);
    highest = std::max(highest, scores[slot]);
  }
  float total = 0;
  std::fill(out, out + shape.dim, 0.0f);
  for (int64_t slot = 0; slot < seen; ++slot) {
    const float weight = std::exp(scores[slot] - highest);
    total += weight;
    const float* value = values + slot * step;
    for (int64_t i = 0; i < shape.dim; ++i) out[i] += weight * value[i];
  }
  for (int64_t i = 0; i < shape.dim; ++i) out[i] /= total;
}

// query [1, count, head, dim] over keys and values [1, slot, group, dim]; causal from `start`, or by a mask over all.
Tensor& custom_sdpa(KernelRuntimeContext& context, const Tensor& query, const Tensor& key, const Tensor& value,
                    int64_t start, std::optional<Tensor> mask, double dropout, bool causal,
                    std::optional<double> scale, Tensor& out) {
  const bool fits = is_floats(query, 4) && is_floats(key, 4) && is_floats(value, 4) && dropout == 0.0 &&
                    query.size(0) == 1 && key.size(0) == 1 && query.size(3) == key.size(3) &&
                    key.size(2) > 0 && query.size(2) % key.size(2) == 0 && key.nbytes() == value.nbytes() &&
                    start >= 0 && (mask.has_value() || start + query.size(1) <= key.size(1)) &&
                    (!mask.has_value() || (is_floats(*mask, 2) && mask->size(0) == query.size(1) &&
                                           mask->size(1) == key.size(1)));
  ET_KERNEL_CHECK(context, fits, InvalidArgument, out);
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, query.sizes()) == Error::Ok, InvalidArgument, out);
  const Shape shape{query.size(1), query.size(2), query.size(3), key.size(1), key.size(2), start, causal,
                    static_cast<float>(scale.value_or(1.0 / std::sqrt(double(query.size(3)))))};
  const float* queries = query.const_data_ptr<float>();
  const float* keys = key.const_data_ptr<float>();
  const float* values = value.const_data_ptr<float>();
  const float* masks = mask.has_value() ? mask->const_data_ptr<float>() : nullptr;
  float* found = out.mutable_data_ptr<float>();
  const int64_t tasks = shape.count * shape.heads;
  const auto work = [&](int64_t begin, int64_t end) {
    std::vector<float> scores(static_cast<size_t>(shape.slots));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / shape.heads, head = task % shape.heads;
      const int64_t group = head / (shape.heads / shape.groups);
      const int64_t held = masks ? shape.slots : shape.start + shape.count;
      const int64_t seen = shape.causal && !masks ? shape.start + row + 1 : held;
      attend(shape, queries + task * shape.dim, keys + group * shape.dim, values + group * shape.dim,
             masks ? masks + row * shape.slots : nullptr, seen, scores, found + task * shape.dim);
    }
  };
  // A thread is woken for at least this many products.
  const int64_t each = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, shape.dim * (shape.start + shape.count)));
  executorch::extension::parallel_for(0, tasks, each, work);
  return out;
}

bool& used() {
  static bool own = false;
  return own;
}

bool is_registered(const char* name) {
  for (const auto& kernel : executorch::runtime::get_registered_kernels()) {
    if (kernel.name_ != nullptr && std::strcmp(kernel.name_, name) == 0) return true;
  }
  return false;
}

constexpr const char kUpdate[] = "llama::update_cache.out";
constexpr const char kAttention[] = "llama::custom_sdpa.out";

template <typename Functor>
void add(const char* name, Functor functor) {
  if (is_registered(name)) return;
  const executorch::runtime::Kernel kernel = executorch::extension::make_boxed_kernel(name, functor);
  if (executorch::runtime::register_kernel(kernel) == Error::Ok) used() = true;
}

}  // namespace

void add_missing_operators() {
  add(kUpdate, EXECUTORCH_FN(update_cache, kUpdate));
  add(kAttention, EXECUTORCH_FN(custom_sdpa, kAttention));
}

bool own_operators_are_used() { return used(); }
