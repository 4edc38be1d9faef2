// What NativeModel.kt calls. Texts pass as bytes in UTF-8, because Java's own encoding of strings is another one.
#include <jni.h>

#include <optional>
#include <string>
#include <vector>

#include "edgekit_native.h"

namespace {

std::optional<std::string> bytes_of(JNIEnv* env, jbyteArray array) {
  if (array == nullptr) return std::nullopt;
  std::string bytes(static_cast<size_t>(env->GetArrayLength(array)), '\0');
  env->GetByteArrayRegion(array, 0, static_cast<jsize>(bytes.size()), reinterpret_cast<jbyte*>(bytes.data()));
  return bytes;
}

jbyteArray array_of(JNIEnv* env, const char* text, size_t size) {
  const jbyteArray array = env->NewByteArray(static_cast<jsize>(size));
  if (array != nullptr) env->SetByteArrayRegion(array, 0, static_cast<jsize>(size), reinterpret_cast<const jbyte*>(text));
  return array;
}

// Throws NativeModel.Failed with the last error of this thread.
void fail(JNIEnv* env) {
  const std::string line = edgekit_last_error();
  const jclass type = env->FindClass("edgekit/NativeModel$Failed");
  const jbyteArray bytes = array_of(env, line.data(), line.size());
  if (type == nullptr || bytes == nullptr) return;  // another exception is on its way
  const jobject error = env->NewObject(type, env->GetMethodID(type, "<init>", "([B)V"), bytes);
  if (error != nullptr) env->Throw(static_cast<jthrowable>(error));
}

edgekit_model* model_of(jlong handle) { return reinterpret_cast<edgekit_model*>(handle); }

const char* text_or_null(const std::optional<std::string>& text) { return text ? text->c_str() : nullptr; }

// Hands pieces of text to Kotlin until that throws.
struct Listener {
  JNIEnv* env;
  jobject sink;
  jmethodID method;
  edgekit_model* model;

  static void on_text(void* context, const char* text, size_t bytes) {
    const auto& self = *static_cast<Listener*>(context);
    if (self.env->ExceptionCheck()) return;
    const jbyteArray piece = array_of(self.env, text, bytes);
    if (piece != nullptr) self.env->CallVoidMethod(self.sink, self.method, piece);
    if (self.env->ExceptionCheck()) return edgekit_cancel(self.model);
    self.env->DeleteLocalRef(piece);
  }
};

std::vector<std::string> texts_of(JNIEnv* env, jobjectArray arrays) {
  std::vector<std::string> texts;
  for (jsize place = 0; place < env->GetArrayLength(arrays); ++place) {
    const auto array = static_cast<jbyteArray>(env->GetObjectArrayElement(arrays, place));
    texts.push_back(bytes_of(env, array).value_or(""));
    env->DeleteLocalRef(array);
  }
  return texts;
}

// An array of objects: the text, the tokens, whole numbers, seconds.
jobjectArray packed(JNIEnv* env, const edgekit_answer& answer) {
  const jobjectArray parts = env->NewObjectArray(4, env->FindClass("java/lang/Object"), nullptr);
  const auto count = static_cast<jsize>(answer.count);
  const jbyteArray text = array_of(env, answer.text, answer.bytes);
  const jintArray tokens = env->NewIntArray(count);
  const jlongArray numbers = env->NewLongArray(5);
  const jdoubleArray seconds = env->NewDoubleArray(2);
  if (parts == nullptr || text == nullptr || tokens == nullptr || numbers == nullptr || seconds == nullptr) return nullptr;
  const jlong whole[] = {static_cast<jlong>(answer.reason), static_cast<jlong>(answer.prompt_tokens),
                         static_cast<jlong>(answer.cached_tokens), static_cast<jlong>(answer.drafted_tokens),
                         static_cast<jlong>(answer.accepted_tokens)};
  const jdouble times[] = {answer.prefill_s, answer.decode_s};
  env->SetIntArrayRegion(tokens, 0, count, reinterpret_cast<const jint*>(answer.tokens));
  env->SetLongArrayRegion(numbers, 0, 5, whole);
  env->SetDoubleArrayRegion(seconds, 0, 2, times);
  const jobject each[] = {text, tokens, numbers, seconds};
  for (jsize place = 0; place < 4; ++place) env->SetObjectArrayElement(parts, place, each[place]);
  return parts;
}

}  // namespace

extern "C" {

JNIEXPORT void JNICALL Java_edgekit_NativeModel_checkFiles(JNIEnv* env, jclass, jbyteArray folder) {
  if (edgekit_verify(text_or_null(bytes_of(env, folder))) != 0) fail(env);
}

JNIEXPORT void JNICALL Java_edgekit_NativeModel_makePacked(JNIEnv* env, jclass, jbyteArray folder,
                                                           jbyteArray onnxruntime, jbyteArray packed) {
  const auto place = bytes_of(env, folder), library = bytes_of(env, onnxruntime), weights = bytes_of(env, packed);
  if (edgekit_pack(text_or_null(place), text_or_null(library), text_or_null(weights)) != 0) fail(env);
}

JNIEXPORT jlong JNICALL Java_edgekit_NativeModel_open(JNIEnv* env, jclass, jbyteArray folder, jbyteArray onnxruntime,
                                                      jint threads, jboolean exact, jbyteArray packed) {
  const auto place = bytes_of(env, folder), library = bytes_of(env, onnxruntime), weights = bytes_of(env, packed);
  edgekit_model* model =
      edgekit_open(text_or_null(place), text_or_null(library), threads, exact, text_or_null(weights));
  if (model == nullptr) fail(env);
  return reinterpret_cast<jlong>(model);
}

JNIEXPORT void JNICALL Java_edgekit_NativeModel_release(JNIEnv*, jclass, jlong handle) {
  edgekit_close(model_of(handle));
}

JNIEXPORT void JNICALL Java_edgekit_NativeModel_stop(JNIEnv*, jclass, jlong handle) { edgekit_cancel(model_of(handle)); }

JNIEXPORT jlongArray JNICALL Java_edgekit_NativeModel_measured(JNIEnv* env, jclass, jlong handle) {
  edgekit_memory found;
  if (edgekit_memory_of(model_of(handle), &found) != 0) return fail(env), nullptr;
  const jlong bytes[] = {found.weights,     found.engine,          found.cache,       found.cache_used,
                         found.activations, found.process_private, found.process_peak};
  const jlongArray array = env->NewLongArray(7);
  if (array != nullptr) env->SetLongArrayRegion(array, 0, 7, bytes);
  return array;
}

JNIEXPORT jbyteArray JNICALL Java_edgekit_NativeModel_rendered(JNIEnv* env, jclass, jlong handle, jbyteArray messages,
                                                               jbyteArray tools, jbyteArray options) {
  const auto asked = bytes_of(env, messages), listed = bytes_of(env, tools), values = bytes_of(env, options);
  const edgekit_chat chat{text_or_null(asked), text_or_null(listed), text_or_null(values), 1};
  std::string text(4096, '\0');
  for (;;) {
    const int64_t size = edgekit_render(edgekit_template_of(model_of(handle)), &chat, text.data(), text.size());
    if (size < 0) return fail(env), nullptr;
    if (static_cast<size_t>(size) <= text.size()) return array_of(env, text.data(), static_cast<size_t>(size));
    text.resize(static_cast<size_t>(size));
  }
}

// `whole`: max_tokens, draft_tokens, top_k, seed, ignores_ends, reuses_prefix. `real`: temperature, top_p, min_p,
// typical_p, and the penalties for repetition, presence and frequency.
JNIEXPORT jobjectArray JNICALL Java_edgekit_NativeModel_answered(JNIEnv* env, jclass, jlong handle, jbyteArray prompt,
                                                                 jboolean is_chat, jlongArray whole, jdoubleArray real,
                                                                 jobjectArray stops, jobject sink) {
  const std::string text = bytes_of(env, prompt).value_or("");
  const edgekit_tokenizer* tokenizer = edgekit_tokenizer_of(model_of(handle));
  std::vector<int32_t> tokens(text.size() + 64);
  for (;;) {
    const int64_t count = edgekit_encode(tokenizer, text.data(), text.size(), !is_chat, tokens.data(), tokens.size());
    if (count < 0) return fail(env), nullptr;
    const bool fits = static_cast<size_t>(count) <= tokens.size();
    tokens.resize(static_cast<size_t>(count));
    if (fits) break;
  }
  jlong numbers[6];
  jdouble values[7];
  env->GetLongArrayRegion(whole, 0, 6, numbers);
  env->GetDoubleArrayRegion(real, 0, 7, values);
  const std::vector<std::string> ends = texts_of(env, stops);
  std::vector<const char*> pointers;
  for (const std::string& end : ends) pointers.push_back(end.c_str());
  const jmethodID method = env->GetMethodID(env->GetObjectClass(sink), "onText", "([B)V");
  if (method == nullptr || env->ExceptionCheck()) return nullptr;
  Listener listener{env, sink, method, model_of(handle)};

  edgekit_options options = edgekit_default_options();
  options.max_tokens = numbers[0], options.draft_tokens = numbers[1], options.top_k = numbers[2];
  options.seed = static_cast<uint64_t>(numbers[3]);
  options.ignores_ends = numbers[4] != 0, options.reuses_prefix = numbers[5] != 0, options.begins_text = is_chat;
  options.temperature = values[0], options.top_p = values[1], options.min_p = values[2], options.typical_p = values[3];
  options.repetition_penalty = values[4], options.presence_penalty = values[5], options.frequency_penalty = values[6];
  options.stops = pointers.data(), options.stop_count = pointers.size();
  options.on_text = Listener::on_text, options.context = &listener;
  edgekit_answer answer;
  const int failed = edgekit_generate(model_of(handle), tokens.data(), tokens.size(), &options, &answer);
  if (env->ExceptionCheck()) return nullptr;  // the listener's
  if (failed != 0) return fail(env), nullptr;
  return packed(env, answer);
}

}  // extern "C"
