// edgekit's native library: opens a sealed artifact of the onnx target, or of executorch where the library was built
// with it, and generates text with it.
//
// Every function that can fail returns a negative number or null then, and edgekit_last_error says why in one line.
// A model, a tokenizer or a template may be used by one thread at a time; edgekit_cancel may be called from any.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define edgekit_export __attribute__((visibility("default")))

// Grows when a function or a structure below changes, so that a program can refuse a library that was built from
// another header.
#define EDGEKIT_API_VERSION 4
edgekit_export int edgekit_api_version(void);

typedef struct edgekit_tokenizer edgekit_tokenizer;
typedef struct edgekit_template edgekit_template;
typedef struct edgekit_model edgekit_model;

// The error of the last call of this thread that failed; valid until the next one fails.
edgekit_export const char* edgekit_last_error(void);

// A tokenizer from the bytes of a tokenizer.json; null where it is damaged or not supported.
edgekit_export edgekit_tokenizer* edgekit_tokenizer_open(const char* json, size_t bytes);
edgekit_export void edgekit_tokenizer_close(edgekit_tokenizer* tokenizer);  // null is allowed

// The number of tokens of a text in UTF-8; the first `capacity` of them are written to `tokens`. With `adds_special`,
// they stand between the tokens that the tokenizer puts around a text.
edgekit_export int64_t edgekit_encode(const edgekit_tokenizer* tokenizer, const char* text, size_t bytes,
                                      int adds_special, int32_t* tokens, size_t capacity);

// The number of bytes of the text of some tokens; the first `capacity` of them are written to `text`.
edgekit_export int64_t edgekit_decode(const edgekit_tokenizer* tokenizer, const int32_t* tokens, size_t count,
                                      int skips_special, char* text, size_t capacity);

// A chat template from the bytes of a tokenizer_config.json and of a chat_template.jinja, of which either may be null.
// A template that is not supported is refused when it is rendered.
edgekit_export edgekit_template* edgekit_template_open(const char* config, size_t config_bytes, const char* jinja,
                                                       size_t jinja_bytes);
edgekit_export void edgekit_template_close(edgekit_template* chat_template);  // null is allowed

typedef struct edgekit_chat {
  const char* messages;        // JSON: [{"role": "user", "content": "..."}, ...]
  const char* tools;           // JSON: a list of descriptions of functions; null: none
  const char* options;         // JSON: an object of further values that the template reads; null: none
  int adds_generation_prompt;  // the prompt ends where the model's answer begins
} edgekit_chat;

// The number of bytes of the prompt of a chat; the first `capacity` of them are written to `text`. Encode it without
// `adds_special`, and set `begins_text` of the answer's options.
edgekit_export int64_t edgekit_render(const edgekit_template* chat_template, const edgekit_chat* chat, char* text,
                                      size_t capacity);

// Checks an artifact of any target by the rules of `edgekit verify`: the manifest's seal, the names, sizes and hashes of
// all files, their chunks, and that there is nothing else. 0, or -1 where it is damaged.
edgekit_export int edgekit_verify(const char* folder);

// Packs the weights of an artifact for ONNX Runtime into `packed`, a folder that nothing else uses, or does nothing where
// that was done before. Without, each opening packs them into private memory, which counts against an app; packed ones
// are mapped. They take two to three times the weights on disk, and this call as much private memory as an opening without
// them; one process at a time may make it. Do it again after ONNX Runtime or the artifact changed. 0, or -1 where it
// failed.
edgekit_export int edgekit_pack(const char* folder, const char* runtime, const char* packed);

// Opens an artifact: every file is hashed and compared with the manifest first. `runtime` is the file of ONNX Runtime's
// library (null: libonnxruntime, where the system finds it); for programs of ExecuTorch, a library with operators of it
// (null: kernels of our own for those that the build lacks). With 0 `threads`, the plan's number
// is taken, but at most the cores of this process's affinity mask.
// With `exact`, a text does not depend on drafts, on a prefix that is reused, or on chunks. On arm64, ONNX Runtime then
// computes one token at a time. `packed` is a folder that `edgekit_pack` made on this device, which only the app may
// write, or null.
edgekit_export edgekit_model* edgekit_open(const char* folder, const char* runtime, int threads, int exact,
                                           const char* packed);
edgekit_export void edgekit_close(edgekit_model* model);  // null is allowed

// The model's tokenizer and chat template, which live as long as the model.
edgekit_export const edgekit_tokenizer* edgekit_tokenizer_of(const edgekit_model* model);
edgekit_export const edgekit_template* edgekit_template_of(const edgekit_model* model);

typedef struct edgekit_options {
  int64_t max_tokens;        // -1: as many as the context can hold, or the window
  const char* const* stops;  // end the answer before one of these texts
  size_t stop_count;
  int ignores_ends;      // go on where the model would end
  int begins_text;       // the prompt is a rendered chat template, so the answer is a text of its own
  int reuses_prefix;     // do not compute again what the prompt has in common with the text before it
  int64_t draft_tokens;  // by prompt lookup, verified together; 0 to 64

  double temperature;  // 0 takes the likeliest token
  int64_t top_k;       // 0: all
  double top_p, min_p, typical_p;
  double repetition_penalty, presence_penalty, frequency_penalty;
  uint64_t seed;  // the same seed gives the same text

  // Is called with each piece of text as it is decided, by the thread that generates; null is allowed.
  void (*on_text)(void* context, const char* text, size_t bytes);
  void* context;
} edgekit_options;

// Greedy, without a limit or a stop string.
edgekit_export edgekit_options edgekit_default_options(void);

typedef enum edgekit_reason { edgekit_stopped = 0, edgekit_out_of_length = 1, edgekit_cancelled = 2 } edgekit_reason;

typedef struct edgekit_answer {
  const char* text;
  size_t bytes;
  const int32_t* tokens;  // without the token that ended it
  size_t count;
  size_t prompt_tokens, cached_tokens;     // of the prompt, and those that were not computed again
  size_t drafted_tokens, accepted_tokens;  // by prompt lookup
  edgekit_reason reason;
  double prefill_s, decode_s;  // until the first token, and for those after it
} edgekit_answer;

// Answers a prompt of tokens. 0, or -1 where it failed; the answer lives until the next one.
edgekit_export int edgekit_generate(edgekit_model* model, const int32_t* prompt, size_t count,
                                    const edgekit_options* options, edgekit_answer* answer);

// Bytes of a model's memory; -1 where the system does not count them.
typedef struct edgekit_memory {
  int64_t weights;          // resident pages of mapped files, which the system may drop
  int64_t engine;           // private: what opening the model took, with weights that the runtime packed
  int64_t cache;            // private, once it is full: keys and values of the whole context, or of the window
  int64_t cache_used;       // of the tokens that it holds now
  int64_t activations;      // private: what was taken since the model was opened, without the cache
  int64_t process_private;  // of the whole process: what a phone counts against an app
  int64_t process_peak;     // resident in the whole process at once, files included
} edgekit_memory;

// 0, or -1 where it failed. Takes milliseconds. Other models of the process, and the app itself, are in
// `process_private` and, as far as they grow after this model was opened, in `activations`.
edgekit_export int edgekit_memory_of(const edgekit_model* model, edgekit_memory* memory);

// Ends the answer that is being generated, from any thread or from `on_text`.
edgekit_export void edgekit_cancel(edgekit_model* model);

#ifdef __cplusplus
}
#endif
