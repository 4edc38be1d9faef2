// A conversation with an artifact of edgekit, by ExecuTorch's own runner: its tokenizer, sampler and streaming.

import ExecuTorchLLM
import Foundation

/// `folder` is an artifact's. Use it from one queue; only `stop` may be called from another.
public final class ChatModel {
  private let format: ChatFormat
  private let runner: TextRunner
  private let system: String?
  private let starts: CrashGuard?
  private var hasBegun = false

  /// `folder` is that of the setting which `starts` chose; `starts` notes how far this start comes. `chatFormat` is the
  /// file that `edgekit inspect --chat-format` printed, in the app's bundle.
  public init(folder: URL, chatFormat: URL, system: String? = nil, starts: CrashGuard? = nil) throws {
    format = try JSONDecoder().decode(ChatFormat.self, from: Data(contentsOf: chatFormat))
    runner = TextRunner(
      modelPath: folder.appendingPathComponent("model.pte").path,
      tokenizerPath: folder.appendingPathComponent("tokenizer.json").path)
    self.system = system
    self.starts = starts
  }

  /// Read the weights now, so that the first answer does not wait for them.
  public func load() throws {
    try starts?.begin()
    try runner.load()
    try starts?.opened()
  }

  /// Answer `question`; `onText` gets the text piece by piece.
  public func ask(_ question: String, maxTokens: Int, temperature: Double = 0.7, onText: @escaping (String) -> Void) throws {
    let prompt = hasBegun ? format.next(question: question) : try format.begin(system: system, question: question)
    hasBegun = true
    let config = Config {
      $0.isEchoEnabled = false
      $0.maximumNewTokens = maxTokens
      $0.temperature = temperature
    }
    try starts?.beforeTokens()
    try runner.generate(prompt, config) { [starts, format] piece in
      try? starts?.afterTokens(1)  // a file that cannot be written is told by `endWell`
      if !format.isEnd(piece) { onText(piece) }
    }
    try starts?.endWell()
  }

  public func stop() { runner.stop() }

  /// Forget the conversation. Call it from `didReceiveMemoryWarning`, or release the model.
  public func reset() {
    runner.reset()
    hasBegun = false
  }
}
