#include "program.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

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
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::threadpool::get_threadpool;
using executorch::runtime::Error;

namespace {

constexpr int64_t kLayout = 2;  // of edgekit's programs

void check(Error error, const std::string& what) {
  if (error == Error::Ok) return;
  std::string why = executorch::runtime::to_string(error);
  if (error == Error::OperatorMissing) why += "; this runner was built without an operator that the program calls";
  if (error == Error::NotFound) why += "; this runner was built without the backend that the program was lowered to";
  throw std::runtime_error(what + ": ExecuTorch says " + why);
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

  Module module;
};

Program::Program(const std::string& path, int threads) {
  executorch::runtime::runtime_init();
  add_missing_operators();
  if (auto* pool = get_threadpool()) pool->_unsafe_reset_threadpool(static_cast<uint32_t>(threads));
  parts_ = std::make_unique<Parts>(path);
  check(parts_->module.load(), path);
  const auto names = parts_->module.method_names();
  check(names.error(), path);
  if (names->count("edgekit_layout") == 0) throw std::runtime_error(path + ": is no program of edgekit");
  if (const int64_t layout = parts_->fact("edgekit_layout"); layout != kLayout) {
    throw std::runtime_error(path + ": has layout " + std::to_string(layout) + ", this runner knows " +
                             std::to_string(kLayout) + "; export it again");
  }
  slots_ = parts_->fact("get_max_context_len");
  chunk_ = parts_->fact("get_max_seq_len");
  vocabulary_ = parts_->fact("get_vocab_size");
  check(parts_->module.load_method("forward"), path + ": forward");
}

Program::~Program() = default;

int Program::threads() const {
  auto* pool = get_threadpool();
  return pool ? static_cast<int>(pool->get_thread_count()) : 1;
}

int64_t Program::feed(const int64_t* tokens, int64_t count, int64_t start) {
  if (count < 1 || count > chunk_ || start < 0 || start + count > slots_) {
    throw std::runtime_error(std::to_string(count) + " tokens after " + std::to_string(start) +
                             ": the program takes " + std::to_string(chunk_) + " at once and holds " +
                             std::to_string(slots_));
  }
  std::vector<int64_t> fed(tokens, tokens + count), first{start};
  if (const auto [low, high] = std::minmax_element(fed.begin(), fed.end()); *low < 0 || *high >= vocabulary_) {
    throw std::runtime_error("a token outside the vocabulary of " + std::to_string(vocabulary_));
  }
  auto ids = from_blob(fed.data(), {1, static_cast<int>(count)}, ScalarType::Long);
  auto at = from_blob(first.data(), {1}, ScalarType::Long);
  auto found = parts_->module.execute("forward", {*ids, *at});
  check(found.error(), "forward");
  const auto& logits = (*found)[0].toTensor();
  if (logits.numel() != vocabulary_ || logits.scalar_type() != ScalarType::Float) {
    throw std::runtime_error("forward: gave no row of logits");
  }
  const float* row_of = logits.const_data_ptr<float>();
  return std::max_element(row_of, row_of + vocabulary_) - row_of;
}

const char* Program::version() { return RUNNER_EXECUTORCH_VERSION; }

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
