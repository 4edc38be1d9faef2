// Notes in a file what the app is about to do, so that the next start can tell if it died. The file and the rules are
// those of `guard=` in Python's `edgekit.open`.

import Foundation

/// Use it from one queue.
public final class CrashGuard {
  private static let failuresAllowed = 1  // a user who ends the app looks like a crash
  private static let safeTokens = 8  // tokens to generate before a start counts as successful
  private static let mostBytes = 64 << 10

  private enum State: String, Codable {
    case opening, open
    case firstTokens = "first tokens"
    case endedWell = "ended well"
  }

  private struct Record: Codable {
    var version = 1
    var artifact: String
    var step = 0
    var state = State.opening
    var failures = 0
    var note = ""
  }

  private let file: URL
  private var record: Record
  private var tokens = 0

  /// The setting to open, a number in the list.
  public var step: Int { record.step }

  /// Why a smaller setting is opened; empty where it is not.
  public var note: String { record.note }

  /// `artifact` is the sha256 of the newest artifact's manifest; a new one starts anew. `settings` says what can be
  /// opened, the largest first: the artifact, the same model with a shorter context, the former version. Open the one
  /// of number `step`. After two starts in a row that died, each further start takes the next; show `note` then.
  public init(file: URL, artifact: String, settings: [String]) {
    self.file = file
    guard var last = Self.read(file), last.version == 1, last.artifact == artifact, (0...100).contains(last.step),
      (0..<1_000_000_000).contains(last.failures)
    else {
      record = Record(artifact: artifact)
      return
    }
    last.step = min(last.step, settings.count - 1)
    if last.state == .opening || last.state == .firstTokens {
      last.failures += 1
      if last.failures > Self.failuresAllowed {
        let smaller = min(last.step + 1, settings.count - 1)
        let moment = last.state == .opening ? "while it was opened" : "at the first tokens"
        let now = smaller > last.step ? "opened smaller: \(settings[smaller])" : "there is nothing smaller to open"
        last.note = "\(last.failures) starts in a row died, the last \(moment) (\(settings[last.step])); \(now)"
        last.step = smaller
      }
    }
    last.state = .opening
    record = last
  }

  /// Call it before the model is opened.
  public func begin() throws { try write(.opening) }

  /// Call it when the model is open. An app that dies while nothing runs did not fail.
  public func opened() throws { try write(.open) }

  /// Call it before a question is computed.
  public func beforeTokens() throws {
    if record.state == .open { try write(.firstTokens) }
  }

  /// Call it with the number of tokens that were generated.
  public func afterTokens(_ count: Int) throws {
    tokens += count
    if tokens >= Self.safeTokens { try endWell() }
  }

  /// Call it when an answer is complete, however short. The next start keeps the setting.
  public func endWell() throws {
    guard record.state == .firstTokens else { return }
    record.failures = 0
    try write(.endedWell)
  }

  private static func read(_ file: URL) -> Record? {
    guard let data = try? Data(contentsOf: file), data.count <= mostBytes else { return nil }
    return try? JSONDecoder().decode(Record.self, from: data)
  }

  private func write(_ state: State) throws {
    record.state = state
    try JSONEncoder().encode(record).write(to: file, options: .atomic)
  }
}
