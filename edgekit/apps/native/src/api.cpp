// The C API: no exception passes it.
#include "edgekit_native.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <string>

#include "artifact.h"
#include "chat_template.h"
#include "errors.h"
#include "model.h"
#include "tokenizer.h"

namespace {

using edgekit::ChatTemplate;
using edgekit::Model;
using edgekit::Tokenizer;

constexpr int kMostDrafted = 64;
thread_local std::string last_error;

// What `body` returns, or `failed` with the error kept.
template <typename Result, typename Body>
Result guarded(Result failed, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    last_error = "there is not enough memory";
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an unknown error";
  }
  return failed;
}

template <typename Value>
const Value* given(const Value* value, const char* name) {
  if (value == nullptr) edgekit::refuse(std::string(name) + " is null");
  return value;
}

edgekit::GenerationOptions read(const edgekit_options& given_options) {
  edgekit::GenerationOptions options;
  if (given_options.stop_count > 0) given(given_options.stops, "stops");
  for (size_t index = 0; index < given_options.stop_count; ++index) {
    options.stop.emplace_back(given(given_options.stops[index], "stops"));
  }
  if (given_options.top_k < 0) edgekit::refuse("top_k: " + std::to_string(given_options.top_k) + " is below 0");
  options.max_tokens = given_options.max_tokens;
  options.ignores_ends = given_options.ignores_ends != 0;
  options.begins_text = given_options.begins_text != 0;
  options.reuses_prefix = given_options.reuses_prefix != 0;
  if (given_options.draft_tokens < 0 || given_options.draft_tokens > kMostDrafted) {
    edgekit::refuse("draft_tokens: " + std::to_string(given_options.draft_tokens) + " is not between 0 and 64");
  }
  options.draft_tokens = static_cast<size_t>(given_options.draft_tokens);
  options.sampling = {given_options.temperature,
                      static_cast<size_t>(given_options.top_k),
                      given_options.top_p,
                      given_options.min_p,
                      given_options.typical_p,
                      given_options.repetition_penalty,
                      given_options.presence_penalty,
                      given_options.frequency_penalty,
                      given_options.seed};
  if (given_options.on_text != nullptr) {
    options.on_text = [&given_options](std::string_view text) {
      given_options.on_text(given_options.context, text.data(), text.size());
    };
  }
  return options;
}

// The types of the C API stand for these, and are never defined.
const Tokenizer& opened(const edgekit_tokenizer* tokenizer) {
  return *reinterpret_cast<const Tokenizer*>(given(tokenizer, "tokenizer"));
}

const ChatTemplate& opened(const edgekit_template* chat_template) {
  return *reinterpret_cast<const ChatTemplate*>(given(chat_template, "template"));
}

Model& opened(edgekit_model* model) {
  given(model, "model");
  return *reinterpret_cast<Model*>(model);
}

template <typename From, typename To>
int64_t copied(const From& from, To* to, size_t capacity) {
  std::copy_n(from.begin(), std::min(from.size(), capacity), to);
  return static_cast<int64_t>(from.size());
}

}  // namespace

int edgekit_api_version(void) { return EDGEKIT_API_VERSION; }

const char* edgekit_last_error(void) { return last_error.c_str(); }

edgekit_tokenizer* edgekit_tokenizer_open(const char* json, size_t bytes) {
  return guarded<edgekit_tokenizer*>(nullptr, [&] {
    if (bytes > edgekit::kMostTokenizerBytes) edgekit::refuse("tokenizer.json: it is too large");
    return reinterpret_cast<edgekit_tokenizer*>(new Tokenizer(std::string(given(json, "json"), bytes)));
  });
}

void edgekit_tokenizer_close(edgekit_tokenizer* tokenizer) { delete reinterpret_cast<Tokenizer*>(tokenizer); }

int64_t edgekit_encode(const edgekit_tokenizer* tokenizer, const char* text, size_t bytes, int adds_special,
                       int32_t* tokens, size_t capacity) {
  return guarded<int64_t>(-1, [&] {
    const std::string_view whole(given(text, "text"), bytes);
    return copied(opened(tokenizer).encode(whole, adds_special != 0), tokens, capacity);
  });
}

int64_t edgekit_decode(const edgekit_tokenizer* tokenizer, const int32_t* tokens, size_t count, int skips_special,
                       char* text, size_t capacity) {
  return guarded<int64_t>(-1, [&] {
    const int32_t* first = count == 0 ? nullptr : given(tokens, "tokens");
    return copied(opened(tokenizer).decode({first, first + count}, skips_special != 0), text, capacity);
  });
}

edgekit_template* edgekit_template_open(const char* config, size_t config_bytes, const char* jinja,
                                        size_t jinja_bytes) {
  return guarded<edgekit_template*>(nullptr, [&] {
    const auto text = [](const char* data, size_t bytes) {
      return data == nullptr ? std::nullopt : std::optional(std::string(data, bytes));
    };
    if (config_bytes > edgekit::kMostTemplateConfigBytes) edgekit::refuse("tokenizer_config.json: it is too large");
    return reinterpret_cast<edgekit_template*>(new ChatTemplate(text(config, config_bytes), text(jinja, jinja_bytes)));
  });
}

void edgekit_template_close(edgekit_template* chat_template) { delete reinterpret_cast<ChatTemplate*>(chat_template); }

int64_t edgekit_render(const edgekit_template* chat_template, const edgekit_chat* chat, char* text, size_t capacity) {
  return guarded<int64_t>(-1, [&] {
    const auto optional = [](const char* json) { return json == nullptr ? std::nullopt : std::optional<std::string>(json); };
    given(chat, "chat");
    const edgekit::Chat asked{given(chat->messages, "messages"), optional(chat->tools), optional(chat->options),
                              chat->adds_generation_prompt != 0};
    return copied(opened(chat_template).render(asked), text, capacity);
  });
}

int edgekit_verify(const char* folder) {
  return guarded<int>(-1, [&] {
    edgekit::Artifact(given(folder, "folder"));
    return 0;
  });
}

int edgekit_pack(const char* folder, const char* runtime, const char* packed) {
  return guarded<int>(-1, [&] {
    edgekit::pack(given(folder, "folder"), runtime == nullptr ? "" : runtime, given(packed, "packed"));
    return 0;
  });
}

edgekit_model* edgekit_open(const char* folder, const char* runtime, int threads, int exact, const char* packed) {
  return guarded<edgekit_model*>(nullptr, [&] {
    const auto text = [](const char* optional) { return std::string(optional == nullptr ? "" : optional); };
    auto* model = new Model(given(folder, "folder"), text(runtime), threads, exact != 0, text(packed));
    return reinterpret_cast<edgekit_model*>(model);
  });
}

void edgekit_close(edgekit_model* model) { delete reinterpret_cast<Model*>(model); }

const edgekit_tokenizer* edgekit_tokenizer_of(const edgekit_model* model) {
  return guarded<const edgekit_tokenizer*>(nullptr, [&] {
    const auto* opened_model = reinterpret_cast<const Model*>(given(model, "model"));
    return reinterpret_cast<const edgekit_tokenizer*>(&opened_model->tokenizer());
  });
}

const edgekit_template* edgekit_template_of(const edgekit_model* model) {
  return guarded<const edgekit_template*>(nullptr, [&] {
    const auto* opened_model = reinterpret_cast<const Model*>(given(model, "model"));
    return reinterpret_cast<const edgekit_template*>(&opened_model->chat_template());
  });
}

edgekit_options edgekit_default_options(void) {
  const edgekit::Sampling sampling;
  edgekit_options options{};
  options.max_tokens = -1;
  options.top_p = sampling.top_p, options.typical_p = sampling.typical_p;
  options.repetition_penalty = sampling.repetition_penalty;
  return options;
}

int edgekit_generate(edgekit_model* model, const int32_t* prompt, size_t count, const edgekit_options* options,
                     edgekit_answer* answer) {
  return guarded<int>(-1, [&] {
    given(answer, "answer");
    const int32_t* first = count == 0 ? nullptr : given(prompt, "prompt");
    const edgekit::Answer& made = opened(model).generate({first, first + count}, read(*given(options, "options")));
    *answer = {made.text.data(),    made.text.size(),     made.tokens.data(),
               made.tokens.size(),  made.prompt_tokens,   made.cached_tokens,
               made.drafted_tokens, made.accepted_tokens, static_cast<edgekit_reason>(made.reason),
               made.prefill_s,      made.decode_s};
    return 0;
  });
}

int edgekit_memory_of(const edgekit_model* model, edgekit_memory* memory) {
  return guarded<int>(-1, [&] {
    const edgekit::Memory found = reinterpret_cast<const Model*>(given(model, "model"))->memory();
    given(memory, "memory");
    *memory = {found.weights,     found.engine,          found.cache,       found.cache_used,
               found.activations, found.process_private, found.process_peak};
    return 0;
  });
}

void edgekit_cancel(edgekit_model* model) {
  if (model != nullptr) reinterpret_cast<Model*>(model)->cancel();
}
