#include "onnxruntime.h"

#include <dlfcn.h>

#include <type_traits>
#include <utility>

#include "errors.h"

namespace edgekit {
namespace {

constexpr uint32_t kApiVersion = 20;  // asked for; newer libraries answer it too

#ifdef __APPLE__
constexpr const char* kDefaultLibrary = "libonnxruntime.dylib";
#else
constexpr const char* kDefaultLibrary = "libonnxruntime.so";
#endif

// The places of functions in the table of ONNX Runtime's C API, in which a place never changes.
enum Function {
  kGetErrorMessage = 2,
  kCreateEnv = 3,
  kDisableTelemetryEvents = 6,
  kCreateSessionFromArray = 8,
  kRun = 9,
  kCreateSessionOptions = 10,
  kSetOptimizedModelFilePath = 11,
  kDisableMemPattern = 17,
  kSetSessionLogSeverityLevel = 22,
  kSetIntraOpNumThreads = 24,
  kSetInterOpNumThreads = 25,
  kCreateRunOptions = 39,
  kCreateTensorWithDataAsOrtValue = 49,
  kCreateCpuMemoryInfo = 69,
  kReleaseEnv = 92,
  kReleaseStatus = 93,
  kReleaseMemoryInfo = 94,
  kReleaseSession = 95,
  kReleaseValue = 96,
  kReleaseRunOptions = 97,
  kReleaseSessionOptions = 100,
  kAddSessionConfigEntry = 130,
  kCreateAndRegisterAllocator = 144,
  kReleaseArenaCfg = 157,
  kCreateArenaCfgV2 = 164,
  kAddRunConfigEntry = 165,
};

constexpr int kErrors = 3;  // level of its log
constexpr int kArena = 1;   // kind of allocator
constexpr int kDefaultMemory = 0;

// The library's first and only exported symbol returns this.
struct ApiBase {
  const void* const* (*functions)(uint32_t version);
  const char* (*version)();
};

}  // namespace

template <typename Result, typename... Arguments>
Result OnnxRuntime::call(int function, Arguments... arguments) const {
  using Called = Result (*)(Arguments...);
  return reinterpret_cast<Called>(const_cast<void*>(functions_[function]))(arguments...);
}

template <typename... Arguments>
void OnnxRuntime::check(int function, Arguments... arguments) const {
  void* status = call<void*>(function, arguments...);
  if (status == nullptr) return;
  std::string why = call<const char*>(kGetErrorMessage, static_cast<const void*>(status));
  call<void>(kReleaseStatus, status);
  for (char& letter : why) {
    if (letter == '\n' || letter == '\r') letter = ' ';
  }
  refuse("onnxruntime: " + why.substr(0, 500));
}

std::shared_ptr<OnnxRuntime> OnnxRuntime::load(const std::string& library) {
  const std::string name = library.empty() ? kDefaultLibrary : library;
  // Never unloaded: its threads and thread-local data may outlive the last session.
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) refuse(name + ": cannot be loaded: " + dlerror() + "; name the file of onnxruntime's library");
  void* symbol = dlsym(handle, "OrtGetApiBase");
  if (symbol == nullptr) refuse(name + ": is no library of onnxruntime");
  const auto* base = reinterpret_cast<const ApiBase* (*)()>(symbol)();
  const std::shared_ptr<OnnxRuntime> made(new OnnxRuntime());
  made->version_ = base->version();
  made->functions_ = base->functions(kApiVersion);
  if (made->functions_ == nullptr) refuse(name + ": is onnxruntime " + made->version_ + "; 1.31 is needed");
  made->check(kCreateEnv, kErrors, "edgekit", &made->environment_);
  made->check(kDisableTelemetryEvents, static_cast<const void*>(made->environment_));
  made->check(kCreateCpuMemoryInfo, kArena, kDefaultMemory, &made->memory_);
  made->share_activations();
  made->check(kCreateRunOptions, &made->giving_back_);
  made->check(kAddRunConfigEntry, made->giving_back_, "memory.enable_memory_arena_shrinkage", "cpu:0");
  return made;
}

void OnnxRuntime::share_activations() {
  const char* names[] = {"arena_extend_strategy", "initial_chunk_size_bytes"};
  const size_t values[] = {1, 1 << 20};  // it grows by the sizes that are asked for
  void* config = nullptr;
  check(kCreateArenaCfgV2, static_cast<const char* const*>(names), static_cast<const size_t*>(values), size_t{2},
        &config);
  void* status = call<void*>(kCreateAndRegisterAllocator, environment_, static_cast<const void*>(memory_),
                             static_cast<const void*>(config));
  if (status != nullptr) call<void>(kReleaseStatus, status);  // one is registered already, which then serves us too
  call<void>(kReleaseArenaCfg, config);
}

OnnxRuntime::~OnnxRuntime() {
  if (giving_back_ != nullptr) call<void>(kReleaseRunOptions, giving_back_);
  if (memory_ != nullptr) call<void>(kReleaseMemoryInfo, memory_);
  if (environment_ != nullptr) call<void>(kReleaseEnv, environment_);
}

Tensor::Tensor(std::shared_ptr<OnnxRuntime> runtime, Number kind, void* data, const std::vector<int64_t>& shape)
    : runtime_(std::move(runtime)) {
  size_t bytes = bytes_of(kind);
  for (const int64_t each : shape) bytes *= static_cast<size_t>(each);
  runtime_->check(kCreateTensorWithDataAsOrtValue, static_cast<const void*>(runtime_->memory_), data, bytes,
                  shape.data(), shape.size(), static_cast<int>(kind), &value_);
}

Tensor::Tensor(Tensor&& other) noexcept
    : runtime_(std::move(other.runtime_)), value_(std::exchange(other.value_, nullptr)) {}

Tensor::~Tensor() {
  if (value_ != nullptr) runtime_->call<void>(kReleaseValue, value_);
}

Session::Session(std::shared_ptr<OnnxRuntime> runtime, const std::string& graph, const std::string& folder, int threads,
                 const SavedGraph& saved)
    : runtime_(std::move(runtime)) {
  const OnnxRuntime& api = *runtime_;
  void* created = nullptr;
  api.check(kCreateSessionOptions, &created);
  const auto release = [&api](void* each) { api.call<void>(kReleaseSessionOptions, each); };
  const std::unique_ptr<void, decltype(release)> options(created, release);
  api.check(kSetIntraOpNumThreads, options.get(), threads);
  api.check(kSetInterOpNumThreads, options.get(), 1);
  api.check(kSetSessionLogSeverityLevel, options.get(), kErrors);
  api.check(kDisableMemPattern, options.get());
  std::vector<std::pair<const char*, std::string>> entries = {
      {"session.model_external_initializers_file_folder_path", folder},
      {"session.use_env_allocators", "1"},
      {"session.use_device_allocator_for_initializers", "1"},
      {"mlas.disable_kleidiai", "1"},  // its kernels round more coarsely, so texts would differ
      {"session.intra_op.allow_spinning", "1"},
      {"session.intra_op.spin_duration_us", "100"},
      {"session.force_spinning_stop", "1"},
  };
  if (!saved.path.empty()) {
    api.check(kSetOptimizedModelFilePath, options.get(), saved.path.c_str());
    entries.emplace_back("session.optimized_model_external_initializers_file_name", saved.data);
    // All but the smallest go outside: scales inside a graph whose weights are outside are corrupted (1.31.1).
    entries.emplace_back("session.optimized_model_external_initializers_min_size_in_bytes", "64");
    entries.emplace_back("session.save_external_prepacked_constant_initializers", "1");
  }
  for (const auto& [name, value] : entries) api.check(kAddSessionConfigEntry, options.get(), name, value.c_str());
  api.check(kCreateSessionFromArray, static_cast<const void*>(api.environment_), static_cast<const void*>(graph.data()),
            graph.size(), static_cast<const void*>(options.get()), &session_);
}

Session::Session(Session&& other) noexcept
    : runtime_(std::move(other.runtime_)), session_(std::exchange(other.session_, nullptr)) {}

Session::~Session() {
  if (session_ != nullptr) runtime_->call<void>(kReleaseSession, session_);
}

void Session::run(const Bound& inputs, const Bound& outputs, bool gives_back) const {
  std::vector<const char*> in_names, out_names;
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const std::string& each : inputs.names) in_names.push_back(each.c_str());
  for (const std::string& each : outputs.names) out_names.push_back(each.c_str());
  for (const Tensor* each : inputs.tensors) in.push_back(each->value());
  for (const Tensor* each : outputs.tensors) out.push_back(each->value());
  const void* options = gives_back ? runtime_->giving_back_ : nullptr;
  runtime_->check(kRun, session_, options, in_names.data(), in.data(), in.size(), out_names.data(), out_names.size(),
                  out.data());
}

}  // namespace edgekit
