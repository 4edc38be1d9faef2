// The operator of attention: GroupQueryAttention as this target's graphs use it, with caches of 32, 16 or 8 bits.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "operator.h"

namespace edgekit {
namespace {

enum Input {
  kQuery, kKey, kValue, kPastKeys, kPastValues, kLengths, kTotal, kCosines, kSines, kPositions, kMask, kSinks,
  kKeySteps, kValueSteps, kInputs
};
enum Output { kResult, kKeys, kValues, kOutputs };
constexpr int64_t kMostHeads = 1 << 12, kMostSize = 1 << 12;
constexpr size_t kFewTasks = 64;           // with fewer, each block of keys is a task of its own
constexpr size_t kMostSums = 4 << 20;      // floats of such blocks
constexpr size_t kLittleWork = 64 << 10;   // products of numbers, for which no thread is asked
constexpr size_t kTokensAtOnce = 16;       // that are rotated

float* work_of(size_t floats) {
  thread_local std::vector<float> work;
  if (work.size() < floats) work.resize(floats);
  return work.data();
}

class AttentionNode : public Node {
 public:
  AttentionNode(const CustomOp& op, const Api& api, const void* info)
      : Node("Attention", api, info), stored_(stored_by(op)) {
    heads_ = size(info, "num_heads", kMostHeads), shared_ = size(info, "kv_num_heads", kMostHeads);
    require(heads_ % shared_ == 0, "num_heads is no multiple of kv_num_heads");
    group_ = heads_ / shared_;
    scale_ = attribute(info, "scale", 0.f), cap_ = attribute(info, "softcap", 0.f);
    const auto window = attribute<int64_t>(info, "local_window_size", -1);
    window_ = window > 0 ? static_cast<size_t>(window) : std::numeric_limits<size_t>::max();
    rotates_ = attribute<int64_t>(info, "do_rotary", 0) != 0;
    interleaved_ = attribute<int64_t>(info, "rotary_interleaved", 0) != 0;
    require(std::isfinite(scale_) && scale_ >= 0 && std::isfinite(cap_) && cap_ >= 0, "scale or softcap is no size");
  }

  Status* status_of_compute(void* context) const {
    return api_.status_of([&] { compute(context); });
  }

  static Stored stored_by(const CustomOp& op) {
    const int type = op.output_type(&op, kKeys);
    return type == kHalf ? Stored::kHalves : type == kInt8 ? Stored::kBytes : Stored::kFloats;
  }

 private:
  // One call: its arrays, whose sizes are checked, and its division into tasks.
  struct Call {
    const AttentionNode& node;
    const AttentionPath& path;
    const float *query, *key, *value;  // of a token; those of the next are `stride` further
    size_t query_stride, key_stride;
    const float *cosines, *sines, *sinks, *key_steps, *value_steps;
    const int32_t* lengths;  // less one
    char *keys, *values;
    float* result;
    size_t sequences, tokens, added, capacity, size, pairs;  // added: tokens whose keys are stored
    float factor;
    float* rotated = nullptr;  // [sequence, shared head, token, head of group, size]
    float* sums = nullptr;     // of each block, where blocks are tasks
    size_t tile = 0, tiles = 0, blocks = 0;  // queries of a tile; tiles and blocks of a sequence's head

    size_t length(size_t sequence) const { return static_cast<size_t>(lengths[sequence]) + 1; }
    size_t rows() const { return tokens * node.group_; }
    size_t tasks() const { return sequences * node.shared_ * tiles; }
    size_t block_floats() const { return Sums::floats(tile, size); }
    char* cached(char* all, size_t sequence, size_t head, size_t token) const {
      const size_t place = ((sequence * node.shared_ + head) * capacity + token) * size;
      return all + place * kStoredBytes[static_cast<size_t>(node.stored_)];
    }

    // Rotates the queries and keys of one token of all sequences, and stores its key and value.
    void add(size_t sequence, size_t token) const {
      const size_t row = sequence * tokens + token, past = length(sequence) - tokens, position = past + token;
      const float *cosine = cosines + position * pairs, *sine = sines + position * pairs;
      for (size_t head = 0; head < node.heads_; head++) {
        const size_t place = ((sequence * node.shared_ + head / node.group_) * tokens + token) * node.group_;
        path.rotate(query + row * query_stride + head * size, size, cosine, sine, pairs, node.interleaved_, factor,
                    rotated + (place + head % node.group_) * size);
      }
      if (!added) return;
      float* turned = work_of(size);
      for (size_t head = 0; head < node.shared_; head++) {
        path.rotate(key + row * key_stride + head * size, size, cosine, sine, pairs, node.interleaved_, 1, turned);
        path.store(node.stored_, turned, key_steps ? key_steps + head * size : nullptr, size,
                   cached(keys, sequence, head, position));
        path.store(node.stored_, value + row * key_stride + head * size,
                   value_steps ? value_steps + head * size : nullptr, size, cached(values, sequence, head, position));
      }
    }

    struct Task {
      Head head;
      Queries queries;
      size_t sequence, shared;
    };
    Task task(size_t index) const {
      const size_t shared = index / tiles % node.shared_, sequence = index / tiles / node.shared_;
      const size_t first = index % tiles * tile, count = std::min(tile, rows() - first);
      const float* steps[] = {key_steps ? key_steps + shared * size : nullptr,
                              value_steps ? value_steps + shared * size : nullptr};
      const Head head = {node.stored_, cached(keys, sequence, shared, 0), cached(values, sequence, shared, 0),
                         steps[0], steps[1], size, node.window_, node.cap_};
      const size_t place = (sequence * node.shared_ + shared) * rows() + first;
      const size_t past = (length(sequence) - tokens) * node.group_;
      return {head, {rotated + place * size, count, node.group_, past + first}, sequence, shared};
    }
    size_t first_block(const Queries& queries) const { return queries.first_key(0, node.window_) / kBlockKeys; }
    size_t end_block(const Queries& queries) const {
      return (queries.end_key(queries.count - 1) + kBlockKeys - 1) / kBlockKeys;
    }

    // Computes one tile of queries, all blocks one after the other.
    void run_tile(size_t index) const {
      const Task now = task(index);
      const size_t count = now.queries.count;
      float* work = work_of(work_floats(count, size) + 2 * Sums::floats(count, size));
      const Sums all = Sums::at(work, count), next = Sums::at(work + Sums::floats(count, size), count);
      // The first block is not joined with nothing: that changes at most the sign of zeros, which the result has not.
      size_t block = first_block(now.queries);
      path.block(now.head, now.queries, block, work + 2 * Sums::floats(count, size), all);
      while (++block < end_block(now.queries)) {
        path.block(now.head, now.queries, block, work + 2 * Sums::floats(count, size), next);
        path.join(all, next, count, size);
      }
      finish(now, all);
    }

    // Computes one block of keys for one tile of queries.
    void run_block(size_t index) const {
      const Task now = task(index / blocks);
      const size_t block = index % blocks;
      if (block < first_block(now.queries) || block >= end_block(now.queries)) return;
      path.block(now.head, now.queries, block, work_of(work_floats(now.queries.count, size)),
                 Sums::at(sums + index * block_floats(), now.queries.count));
    }

    // Joins the blocks of one tile.
    void join(size_t index) const {
      const Task now = task(index);
      const size_t count = now.queries.count;
      const Sums all = Sums::at(work_of(Sums::floats(count, size)), count);
      path.begin(all, count, size);
      for (size_t block = first_block(now.queries); block < end_block(now.queries); block++)
        path.join(all, Sums::at(sums + (index * blocks + block) * block_floats(), count), count, size);
      finish(now, all);
    }

    void finish(const Task& now, const Sums& all) const {
      const size_t width = node.heads_ * size, past = length(now.sequence) - tokens;
      const size_t token = now.queries.first / node.group_ - past;
      float* out = result + (now.sequence * tokens + token) * width + now.shared * node.group_ * size;
      path.finish(all, sinks ? sinks + now.shared * node.group_ : nullptr, now.queries, size, out, width);
    }
  };

  void compute(void* context) const {
    const Tensor query = input(context, kQuery), key = input(context, kKey), value = input(context, kValue);
    const Tensor past_keys = input(context, kPastKeys), past_values = input(context, kPastValues);
    const Tensor lengths = input(context, kLengths);
    const Tensor cosines = input(context, kCosines), sines = input(context, kSines);
    const Tensor sinks = input(context, kSinks), key_steps = input(context, kKeySteps);
    const Tensor value_steps = input(context, kValueSteps);
    using Shape = std::vector<int64_t>;
    const auto heads = static_cast<int64_t>(heads_), shared = static_cast<int64_t>(shared_);

    require(past_keys.shape.size() == 4, "past keys have the shape " + shown(past_keys.shape));
    const int64_t sequences = past_keys.shape[0], capacity = past_keys.shape[2], size = past_keys.shape[3];
    require(past_keys.shape == Shape({sequences, shared, capacity, size}) && past_values.shape == past_keys.shape,
            "past keys and values have the shapes " + shown(past_keys.shape) + " and " + shown(past_values.shape));
    require(size > 0 && size <= kMostSize && size % 4 == 0, "heads of " + std::to_string(size) + " numbers");
    const bool is_joined = !key.is_given();
    const int64_t width = (is_joined ? heads + 2 * shared : heads) * size;
    require(query.shape.size() == 3 && query.shape[0] == sequences && query.shape[2] == width,
            "query has the shape " + shown(query.shape) + ", it must be " + shown({sequences, -1, width}));
    const int64_t tokens = query.shape[1];
    require(is_joined != value.is_given(), "key or value is missing");
    const int64_t added = is_joined ? tokens : key.shape.size() == 3 ? key.shape[1] : -1;
    require(is_joined || ((added == tokens || added == 0) && key.shape == Shape({sequences, added, shared * size}) &&
                          value.shape == key.shape),
            "key and value have the shapes " + shown(key.shape) + " and " + shown(value.shape));
    require(!input(context, kPositions).is_given() && !input(context, kMask).is_given(),
            "position_ids or a mask is given");
    require(!rotates_ || (cosines.shape.size() == 2 && sines.shape == cosines.shape && 2 * cosines.shape[1] <= size),
            "tables have the shapes " + shown(cosines.shape) + " and " + shown(sines.shape));
    require(!sinks.is_given() || sinks.shape == Shape({heads}), "sinks have the shape " + shown(sinks.shape));
    const bool has_steps = stored_ == Stored::kBytes;
    require(!has_steps || (key_steps.shape == Shape({shared, 1, size}) && value_steps.shape == key_steps.shape),
            "steps have the shapes " + shown(key_steps.shape) + " and " + shown(value_steps.shape));
    require(lengths.shape == Shape({sequences}), "seqlens_k has the shape " + shown(lengths.shape));
    const auto* lasts = static_cast<const int32_t*>(lengths.data);
    for (int64_t i = 0; i < sequences; i++)
      require(lasts[i] >= tokens - 1 && lasts[i] < capacity && (!rotates_ || lasts[i] < cosines.shape[0]),
              "seqlens_k is " + std::to_string(lasts[i]) + " for " + std::to_string(tokens) + " tokens, a cache of " +
                  std::to_string(capacity) + " and tables of " + (rotates_ ? shown(cosines.shape) : "no positions"));

    auto* result = output<float>(context, kResult, {sequences, tokens, heads * size});
    char* keys = output<char>(context, kKeys, past_keys.shape);
    char* values = output<char>(context, kValues, past_keys.shape);
    if (sequences == 0 || tokens == 0) return;

    const auto floats = [](const Tensor& tensor) { return static_cast<const float*>(tensor.data); };
    const float* first = floats(query);
    Call call = {*this, attention_path(chosen.load()->name), first,
                 is_joined ? first + heads * size : floats(key),
                 is_joined ? first + (heads + shared) * size : floats(value),
                 static_cast<size_t>(width), static_cast<size_t>(is_joined ? width : shared * size),
                 floats(cosines), floats(sines), floats(sinks),
                 has_steps ? floats(key_steps) : nullptr, has_steps ? floats(value_steps) : nullptr,
                 lasts, keys, values, result,
                 static_cast<size_t>(sequences), static_cast<size_t>(tokens), static_cast<size_t>(added),
                 static_cast<size_t>(capacity), static_cast<size_t>(size),
                 rotates_ ? static_cast<size_t>(cosines.shape[1]) : 0,
                 scale_ > 0 ? scale_ : 1 / std::sqrt(static_cast<float>(size))};
    copy_past(call, past_keys, past_values);
    run(context, call);
  }

  // Copies earlier tokens to outputs that are not the inputs themselves.
  void copy_past(const Call& call, const Tensor& keys, const Tensor& values) const {
    const size_t numbers = call.sequences * shared_ * call.capacity * call.size;
    for (const auto& [from, to] : {std::pair{keys.data, call.keys}, std::pair{values.data, call.values}})
      if (from != to) std::memcpy(to, from, numbers * kStoredBytes[static_cast<size_t>(stored_)]);
  }

  void run(void* context, Call& call) const {
    call.tile = std::max<size_t>(1, kTileQueries / group_) * group_;
    call.tiles = (call.rows() + call.tile - 1) / call.tile;
    call.tile = std::min(call.tile, call.rows());
    size_t longest = 0;
    for (size_t i = 0; i < call.sequences; i++) longest = std::max(longest, call.length(i));
    call.blocks = (longest + kBlockKeys - 1) / kBlockKeys;
    const size_t count = call.sequences * call.rows() * shared_ * call.size;
    const size_t sums = call.tasks() * call.blocks * call.block_floats();
    const bool is_split = call.tiles == 1 && call.blocks > 1 && call.tasks() < kFewTasks && sums <= kMostSums;
    const Scratch scratch(*this, (count + (is_split ? sums : 0)) * sizeof(float));
    call.rotated = static_cast<float*>(scratch.data);
    call.sums = call.rotated + count;

    const auto each = [&](size_t total, bool is_little, void (*run_one)(void*, size_t)) {
      if (is_little || total == 1)
        for (size_t i = 0; i < total; i++) run_one(&call, i);
      else
        parallel(context, total, call, run_one, true);
    };
    const size_t pieces = (call.tokens + kTokensAtOnce - 1) / kTokensAtOnce;
    each(call.sequences * pieces, count < kLittleWork, [](void* given, size_t index) {
      const Call& all = *static_cast<const Call*>(given);
      const size_t parts = (all.tokens + kTokensAtOnce - 1) / kTokensAtOnce, first = index % parts * kTokensAtOnce;
      for (size_t token = first; token < std::min(first + kTokensAtOnce, all.tokens); token++)
        all.add(index / parts, token);
    });
    const bool is_little = count * std::min(longest, window_) < kLittleWork;
    if (!is_split) {
      each(call.tasks(), is_little,
           [](void* given, size_t index) { static_cast<const Call*>(given)->run_tile(index); });
      return;
    }
    each(call.tasks() * call.blocks, is_little,
         [](void* given, size_t index) { static_cast<const Call*>(given)->run_block(index); });
    each(call.tasks(), count * call.blocks < kLittleWork,
         [](void* given, size_t index) { static_cast<const Call*>(given)->join(index); });
  }

  Stored stored_;
  size_t heads_ = 0, shared_ = 0, group_ = 0, window_ = 0;
  float scale_ = 0, cap_ = 0;
  bool rotates_ = false, interleaved_ = false;
};

// The operator for one kind of cache.
template <int kCache>
struct AttentionOp : NodeOp {
  AttentionOp() {
    runs<AttentionNode>();
    name = [](const CustomOp*) { return "GroupQueryAttention"; };
    input_count = [](const CustomOp*) { return size_t{kInputs}; };
    input_type = [](const CustomOp*, size_t index) -> int {
      if (index == kPastKeys || index == kPastValues) return kCache;
      return index == kLengths || index == kTotal ? kInt32 : index == kPositions ? kInt64 : kFloat;
    };
    input_presence = [](const CustomOp*, size_t index) -> int {
      return index == kQuery || (index >= kPastKeys && index <= kTotal) ? kRequired : kOptional;
    };
    output_count = [](const CustomOp*) { return size_t{kOutputs}; };
    output_type = [](const CustomOp*, size_t index) -> int { return index == kResult ? kFloat : kCache; };
  }
};

}  // namespace

const std::vector<const CustomOp*>& attention_operators() {
  static const AttentionOp<kFloat> floats;
  static const AttentionOp<kHalf> halves;
  static const AttentionOp<kInt8> bytes;
  static const std::vector<const CustomOp*> all = {&floats, &halves, &bytes};
  return all;
}

}  // namespace edgekit
