#include "model.h"

#include <algorithm>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

#include "errors.h"
#include "packed_weights.h"
#include "process_memory.h"

namespace edgekit {
namespace {

constexpr size_t kMostConfigBytes = 8u << 20;
constexpr int kMostThreads = 1024;

Plan plan_of(const Artifact& artifact) {
  try {
    return Plan(artifact.plan());
  } catch (const std::runtime_error& error) {
    refuse(artifact.folder() + ": " + error.what());
  }
}

// The cores of this process's affinity mask. Python also counts a CPU quota.
int usable_cores() {
#ifdef __linux__
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// A plan counts its device's cores. More threads than cores are slower, and round otherwise.
int threads_of(const Plan& plan, int threads) {
  if (threads < 0 || threads > kMostThreads)
    refuse("threads: " + std::to_string(threads) + " is not between 0 and 1024");
  return threads == 0 ? std::min(plan.threads, usable_cores()) : threads;
}

std::unique_ptr<Engine> opened(const Artifact& artifact, const std::string& library, int threads, bool is_exact,
                               const std::string& packed) {
  const Plan plan = plan_of(artifact);
  return open_engine(artifact, plan, library, threads_of(plan, threads), is_exact, packed);
}

// The tokens of `generation_config.json` that end a text.
std::vector<TokenId> more_ends(const Artifact& artifact) {
  std::vector<TokenId> found;
  constexpr const char* kConfig = "generation_config.json";
  if (!artifact.has(kConfig)) return found;
  const Json config = Json::parse(artifact.read(kConfig, kMostConfigBytes));
  const Json* ends = config.find("eos_token_id");
  if (ends == nullptr) return found;
  const Json::List listed = ends->is_list() ? ends->list("eos_token_id") : Json::List{*ends};
  for (const Json& each : listed) {
    if (each.is_whole() && each.whole("eos_token_id") >= 0 && each.whole("eos_token_id") < kMostTokens) {
      found.push_back(static_cast<TokenId>(each.whole("eos_token_id")));
    }
  }
  return found;
}

std::optional<std::string> read_if_there(const Artifact& artifact, const char* name, size_t limit) {
  return artifact.has(name) ? std::optional(artifact.read(name, limit)) : std::nullopt;
}

}  // namespace

void pack(const std::string& folder, const std::string& library, const std::string& packed) {
  const Artifact artifact(folder);
  const Plan plan = plan_of(artifact);
  if (plan.target != "onnx") refuse(folder + ": is for " + quote_short(plan.target) + ", whose weights are not packed");
  if (packed.empty()) refuse("packed is empty; name a folder for the packed weights");
  pack_weights(artifact, plan, library, threads_of(plan, 0), packed);
}

Model::Model(const std::string& folder, const std::string& library, int threads, bool is_exact,
             const std::string& packed)
    : Model(Artifact(folder), library, threads, is_exact, packed) {}

Model::Model(const Artifact& artifact, const std::string& library, int threads, bool is_exact,
             const std::string& packed)
    : folder_(artifact.folder()),
      packed_(packed),
      before_(private_bytes()),
      tokenizer_(artifact.read("tokenizer.json", kMostTokenizerBytes)),
      chat_template_(read_if_there(artifact, "tokenizer_config.json", kMostTemplateConfigBytes),
                     read_if_there(artifact, "chat_template.jinja", kMostTemplateBytes)),
      engine_(opened(artifact, library, threads, is_exact, packed)),
      ends_(plan().ends) {
  for (const TokenId each : more_ends(artifact)) ends_.push_back(each);
  loaded_ = private_bytes();
}

Memory Model::memory() const {
  const int64_t now = private_bytes(), touched = engine_->cache_bytes(engine_->most_held());
  const bool is_counted = before_ >= 0 && loaded_ >= 0 && now >= 0;
  const int64_t mapped = mapped_bytes(folder_);
  return {packed_.empty() || mapped < 0 ? mapped : mapped + mapped_bytes(packed_),
          is_counted ? std::max<int64_t>(0, loaded_ - before_) : -1,
          engine_->cache_bytes(plan().window ? plan().window->tokens : plan().capacity),
          engine_->cache_bytes(engine_->held()),
          is_counted ? std::max<int64_t>(0, now - loaded_ - touched) : -1,
          now,
          peak_resident_bytes()};
}

const Answer& Model::generate(const std::vector<TokenId>& prompt, const GenerationOptions& options) {
  is_cancelled_ = false;
  answer_ = edgekit::generate(*engine_, tokenizer_, ends_, prompt, options, is_cancelled_);
  return answer_;
}

}  // namespace edgekit
