// One screen: a question, the answer as it comes, a button that stops it.
package com.example.edgekit

import android.app.Activity
import android.os.Bundle
import android.os.PowerManager
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import java.util.concurrent.Executors

private class Setting(val what: String, val site: String, val manifestSha256: String)

// Put your own here: where the files of each artifact lie, and the sha256 of its manifest.json. The largest comes
// first; the next ones are opened after starts that died.
private val SETTINGS =
  listOf(
    Setting("context 4,096", "https://models.example.com/chat/1.1", ""),
    Setting("context 1,024", "https://models.example.com/chat-short/1.1", ""),
    Setting("the former version", "https://models.example.com/chat/1.0", ""),
  )
private const val MOST_TOKENS = 1024

class MainActivity : Activity() {
  private val worker = Executors.newSingleThreadExecutor()
  private var model: ChatModel? = null
  private lateinit var guard: CrashGuard
  private lateinit var shown: TextView

  override fun onCreate(state: Bundle?) {
    super.onCreate(state)
    shown = TextView(this)
    val question = EditText(this)
    val ask = Button(this).apply { text = "Ask" }
    val stop = Button(this).apply { text = "Stop" }
    setContentView(
      LinearLayout(this).apply {
        orientation = LinearLayout.VERTICAL
        addView(ScrollView(context).apply { addView(shown) }, LinearLayout.LayoutParams(-1, 0, 1f))
        addView(question)
        addView(ask)
        addView(stop)
      }
    )
    ask.setOnClickListener {
      val text = question.text.toString()
      question.text.clear()
      show("\n\n> $text\n")
      work { answer(text) }
    }
    stop.setOnClickListener { model?.stop() }
    work { open() }
  }

  /** The system is short of memory: end the answer and forget the conversation; the weights are mapped again later. */
  override fun onTrimMemory(level: Int) {
    super.onTrimMemory(level)
    if (level < TRIM_MEMORY_BACKGROUND) return
    model?.stop()
    worker.execute {
      model?.close()
      model = null
    }
  }

  override fun onDestroy() {
    model?.stop()
    worker.execute { model?.close() }
    worker.shutdown()
    super.onDestroy()
  }

  private fun open(): ChatModel {
    model?.let { return it }
    guard = CrashGuard(filesDir.resolve("guard.json"), SETTINGS[0].manifestSha256, SETTINGS.map { it.what })
    if (guard.note.isNotEmpty()) show("\n(${guard.note})")
    val setting = SETTINGS[guard.step]
    val folder = ModelFiles(setting.site, setting.manifestSha256, filesDir).fetch {}
    val chatFormat = assets.open("chat_format.json").bufferedReader().use { it.readText() }
    guard.begin()
    val opened = ChatModel(folder, chatFormat)
    opened.load()
    guard.opened()
    return opened.also { model = it }
  }

  private fun answer(question: String) {
    val model = open()
    guard.beforeTokens()
    model.ask(question, MOST_TOKENS) { piece ->
      guard.afterTokens(1)
      show(piece)
    }
    guard.endWell()
  }

  private fun work(task: () -> Unit) {
    worker.execute {
      // A hot phone is slowed down by the system anyway; better to say so than to answer at a crawl.
      val power = getSystemService(PowerManager::class.java)
      if (android.os.Build.VERSION.SDK_INT >= 29 && power.currentThermalStatus >= PowerManager.THERMAL_STATUS_SEVERE) {
        show("\n(the phone is too hot; try again later)")
        return@execute
      }
      try {
        task()
      } catch (error: Exception) {
        show("\n(${error.message})")
      }
    }
  }

  private fun show(text: String) = runOnUiThread { shown.append(text) }
}
