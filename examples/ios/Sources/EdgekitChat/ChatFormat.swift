// The strings between chat messages: what `edgekit inspect ARTIFACT --chat-format` prints.

import Foundation

public struct ChatFormat: Decodable {
  let first: String
  let system: [String]?
  let assistant_to_user: String
  let last: String
  let strips: [String]
  let ends: [String]

  public enum Failure: Error { case takesNoSystemMessage }

  /// What to feed for the first question.
  func begin(system text: String?, question: String) throws -> String {
    guard let text else { return first + user(question) }
    guard let system, system.count == 2 else { throw Failure.takesNoSystemMessage }
    return system[0] + clean("system", text) + system[1] + user(question)
  }

  /// What to feed for a further question, after the answer that the model wrote.
  func next(question: String) -> String { assistant_to_user + user(question) }

  /// Whether `piece` is an end of the answer, which the runner writes as if it belonged to it.
  func isEnd(_ piece: String) -> Bool { ends.contains(piece) }

  private func user(_ question: String) -> String { clean("user", question) + last }

  private func clean(_ role: String, _ content: String) -> String {
    strips.contains(role) ? content.trimmingCharacters(in: .whitespacesAndNewlines) : content
  }
}
