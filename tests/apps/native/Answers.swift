import Edgekit
import Foundation

/// Prints what the test compares with Python: a name and the bytes of a text in each line.
func show(_ name: String, _ text: String) {
  print(name, text.utf8.map { String(format: "%02x", $0) }.joined())
}

func failure(_ body: () throws -> Void) -> String {
  do { try body() } catch { return "\(error)" }
  return "nothing was thrown"
}

struct ListenerFailed: Error, CustomStringConvertible {
  let description = "the listener 🙂 failed"
}

@main
struct Answers {
  static func main() async throws {
    let words = CommandLine.arguments
    let (folder, library, prompt, messages) = (words[1], words[2], words[3], words[4])
    let model = try NativeModel(folder: folder, onnxRuntime: library, threads: 1)
    var short = NativeModel.Options()
    short.maxTokens = 40
    var pieces = ""
    let greedy = try model.generate(prompt, options: short) { pieces += $0 }
    show("greedy", greedy.text)
    show("streamed", pieces)
    show("tokens", greedy.tokens.map(String.init).joined(separator: " "))
    show("reason", "\(greedy.reason)")
    precondition(greedy.promptTokens > 0 && greedy.prefillSeconds > 0 && greedy.decodeSeconds > 0)

    var sampled = short
    (sampled.temperature, sampled.topK, sampled.topP, sampled.minP, sampled.typicalP) = (0.9, 50, 0.95, 0.01, 0.95)
    (sampled.repetitionPenalty, sampled.presencePenalty, sampled.frequencyPenalty) = (1.1, 0.2, 0.1)
    sampled.seed = 1_000_000_000_007
    sampled.stops = ["zzz", "é🙂"]
    show("sampled", try model.generate(prompt, options: sampled).text)
    let rendered = try model.render(messages: messages)
    show("rendered", rendered)
    var chat = NativeModel.Options()
    (chat.maxTokens, chat.seed, chat.temperature) = (30, 5, 0.8)
    show("chat", try model.generate(rendered, options: chat, isChat: true).text)

    let memory = try model.memory()
    show("cache", "\(memory.cache!)")
    precondition((1...memory.cache!).contains(memory.cacheUsed!) && memory.processPeak! > 0)
    #if os(Linux)
      precondition(memory.weights! > 0 && memory.engine! > 0 && memory.activations! >= 0 && memory.processPrivate! > 0)
    #endif

    var endless = NativeModel.Options()
    endless.ignoresEnds = true
    show("cancelled", "\(try model.generate(prompt, options: endless) { _ in model.cancel() }.reason)")
    show("listener", failure { _ = try model.generate(prompt) { _ in throw ListenerFailed() } })
    show("second", failure { _ = try model.generate(prompt) { _ in _ = try model.render(messages: messages) } })

    var joined = ""
    for try await piece in model.stream(prompt, options: short) { joined += piece }
    show("async", joined)
    for try await _ in model.stream(prompt, options: endless) { break }
    while failure({ _ = try model.render(messages: messages) }) != "nothing was thrown" { usleep(1000) }
    show("after it", try model.generate(prompt, options: short).text)

    var wrong = NativeModel.Options()
    wrong.topP = 0
    show("option", failure { _ = try model.generate(prompt, options: wrong) })
    show("template", failure { _ = try model.render(messages: "[1]") })
    show("folder", failure { _ = try NativeModel(folder: "/nowhere/🙂") })
    try NativeModel.verify(folder: folder)
    show("verified", failure { try NativeModel.verify(folder: "/nowhere/🙂") })
  }
}
