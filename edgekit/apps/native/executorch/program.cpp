#include "program.h"

#include <dlfcn.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/platform/runtime.h>

#include "operators.h"

#if __has_include(<executorch/extension/threadpool/threadpool.h>)
#include <executorch/extension/threadpool/threadpool.h>
#else
// The wheel has the thread pool's library without its header: only what is called here.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool
#endif

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::threadpool::get_threadpool;
using executorch::runtime::Error;

namespace edgekit {
namespace {

constexpr int64_t kLayout = 2;  // of edgekit's programs

void check(Error error, const std::string& what) {
  if (error == Error::Ok) return;
  std::string why = executorch::runtime::to_string(error);
  if (error == Error::OperatorMissing) why += "; this build has not an operator that the program calls";
  if (error == Error::NotFound) why += "; this build has not the backend that the program was lowered to";
  throw std::runtime_error(what + ": ExecuTorch says " + why);
}

const char* name_of(Program::Method method) { return method == Program::Method::kForward ? "forward" : "append"; }

// Resizing the pool under a loaded program ends the process, so it is sized once.
void size_pool(int threads) {
  static const bool is_sized = [threads] {
    auto* pool = get_threadpool();
    return pool != nullptr && pool->_unsafe_reset_threadpool(static_cast<uint32_t>(threads));
  }();
  (void)is_sized;
}

}  // namespace

struct Program::Parts {
  explicit Parts(const std::string& path) : module(path, Module::LoadMode::Mmap) {}

  int64_t fact(const std::string& name) {
    auto found = module.execute(name);
    check(found.error(), name);
    if (found->size() != 1 || !(*found)[0].isInt()) throw std::runtime_error(name + ": is no number");
    return (*found)[0].toInt();
  }

  Tensor cache(Method of, int64_t layer, const std::string& part, ScalarType kind, size_t count) {
    const std::string name = "decoder.layers." + std::to_string(layer) + ".attention." + part;
    const auto method = module.method(name_of(of));
    check(method.error(), name);
    auto found = (*method)->get_attribute(name);
    check(found.error(), name);
    if (found->scalar_type() != kind || static_cast<size_t>(found->numel()) != count)
      throw std::runtime_error(name + ": holds no " + std::to_string(count) + " numbers of the plan's kind");
    return *found;
  }

  Module module;
};

Program::Program(const std::string& path, int threads, Method method) : method_(method) {
  executorch::runtime::runtime_init();
  add_missing_operators();
  size_pool(threads);
  parts_ = std::make_unique<Parts>(path);
  check(parts_->module.load(), path);
  const auto names = parts_->module.method_names();
  check(names.error(), path);
  if (names->count("edgekit_layout") == 0) throw std::runtime_error(path + ": is no program of edgekit");
  if (const int64_t layout = parts_->fact("edgekit_layout"); layout != kLayout) {
    throw std::runtime_error(path + ": has layout " + std::to_string(layout) + ", this build knows " +
                             std::to_string(kLayout) + "; export it again");
  }
  slots_ = parts_->fact("get_max_context_len");
  chunk_ = parts_->fact("get_max_seq_len");
  vocabulary_ = parts_->fact("get_vocab_size");
  layers_ = parts_->fact("get_n_layers");
  if (method == Method::kAppend) rows_ = parts_->fact("edgekit_rows");
  if (slots_ < 1 || chunk_ < 1 || vocabulary_ < 1 || rows_ < 1)
    throw std::runtime_error(path + ": states sizes below 1; export it again");
  check(parts_->module.load_method(name_of(method)), path + ": " + name_of(method));
}

Program::~Program() = default;

int Program::threads() const {
  auto* pool = get_threadpool();
  return pool ? static_cast<int>(pool->get_thread_count()) : 1;
}

const float* Program::feed(const int64_t* tokens, int64_t count, int64_t start, int64_t rows) {
  if (count < 1 || count > chunk_ || start < 0 || start + count > slots_ || rows < 1 || rows > std::min(rows_, count)) {
    throw std::runtime_error(std::to_string(count) + " tokens after " + std::to_string(start) + " for " +
                             std::to_string(rows) + " rows of logits: the program takes " + std::to_string(chunk_) +
                             " at once, holds " + std::to_string(slots_) + " and gives " + std::to_string(rows_));
  }
  std::vector<int64_t> fed(tokens, tokens + count), first{start}, asked(static_cast<size_t>(rows));
  if (const auto [low, high] = std::minmax_element(fed.begin(), fed.end()); *low < 0 || *high >= vocabulary_) {
    throw std::runtime_error("a token outside the vocabulary of " + std::to_string(vocabulary_));
  }
  std::iota(asked.begin(), asked.end(), count - rows);
  const auto ids = from_blob(fed.data(), {1, static_cast<int>(count)}, ScalarType::Long);
  const auto at = from_blob(first.data(), {1}, ScalarType::Long);
  const auto places = from_blob(asked.data(), {static_cast<int>(rows)}, ScalarType::Long);
  std::vector<executorch::runtime::EValue> inputs{*ids, *at};
  if (method_ == Method::kAppend) inputs.emplace_back(*places);
  auto found = parts_->module.execute(name_of(method_), inputs);
  check(found.error(), name_of(method_));
  const auto& logits = (*found)[0].toTensor();
  if (logits.numel() != rows * vocabulary_ || logits.scalar_type() != ScalarType::Float) {
    throw std::runtime_error(std::string(name_of(method_)) + ": gave no " + std::to_string(rows) + " rows of logits");
  }
  return logits.const_data_ptr<float>();
}

float* Program::floats(int64_t layer, const std::string& part, size_t count) {
  return parts_->cache(method_, layer, part, ScalarType::Float, count).mutable_data_ptr<float>();
}

int8_t* Program::integers(int64_t layer, const std::string& part, size_t count) {
  return parts_->cache(method_, layer, part, ScalarType::Char, count).mutable_data_ptr<int8_t>();
}

const char* Program::version() { return NATIVE_EXECUTORCH; }

void load_operators(const std::string& library) {
#ifdef RTLD_DEEPBIND
  constexpr int kOwnFirst = RTLD_DEEPBIND;  // its own copies of shared kernels, so that it rounds as it does in Python
#else
  constexpr int kOwnFirst = 0;
#endif
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL | kOwnFirst) == nullptr) {
    throw std::runtime_error(library + ": cannot be loaded: " + dlerror());
  }
}

bool has_own_attention() { return own_operators_are_used(); }

}  // namespace edgekit
