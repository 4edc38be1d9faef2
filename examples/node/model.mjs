// Opens an onnx artifact of edgekit and decodes with it, greedily.
// @ts-check
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { lstat, readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { Template } from '@huggingface/jinja';
import { Tokenizer } from '@huggingface/tokenizers';
import { InferenceSession, Tensor } from 'onnxruntime-node';

/** @typedef {{ role: string, content: string }} Message */
/** @typedef {{ maxTokens?: number, signal?: AbortSignal }} Options */
/** @typedef {{ session: InferenceSession, start: number, stop: number }} Part */

const NAME = /^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$/;
const MOST_MANIFEST_BYTES = 32 * 2 ** 20;

export class Model {
  /** @type {Record<string, Tensor>} keys and values, bound in place as inputs and outputs */
  #cache = {};
  #length = 0;

  /**
   * @param {any} plan @param {Part[]} parts @param {InferenceSession} head @param {Tokenizer} tokenizer
   * @param {Template | null} template @param {any} config of the tokenizer @param {Set<number>} ends
   */
  constructor(plan, parts, head, tokenizer, template, config, ends) {
    this.plan = plan;
    this.parts = parts;
    this.head = head;
    this.tokenizer = tokenizer;
    this.template = template;
    this.config = config;
    this.ends = ends;
    for (const part of parts) {
      for (let layer = part.start; layer < part.stop; layer++) {
        const { kv_heads: heads, head_dim: width } = plan.model.layers[layer];
        const shape = [1, heads, plan.storage.capacity_tokens, width];
        for (const name of ['key', 'value']) {
          const size = shape.reduce((product, each) => product * each, 1);
          this.#cache[`${layer}.${name}`] = new Tensor('float32', new Float32Array(size), shape);
        }
      }
    }
  }

  /** Check every file of the artifact by its hash, and open it. @param {string} folder @returns {Promise<Model>} */
  static async open(folder) {
    const { plan, names } = await checkedManifest(folder);
    refuse(plan);
    /** @param {string} name */
    const json = async (name) => JSON.parse(await readFile(join(folder, name), 'utf8'));
    /** @param {string} name */
    const session = (name) =>
      InferenceSession.create(join(folder, `${name}.onnx`), {
        intraOpNumThreads: plan.threads, interOpNumThreads: 1, logSeverityLevel: 3,
        // Where Arm's kernels would be taken, they round more coarsely than x86's.
        extra: { mlas: { disable_kleidiai: '1' } },
      });
    const layers = plan.model.layers.length;
    const cuts = [...new Set([0, ...plan.exits, layers])].sort((one, other) => one - other);
    const parts = [];
    for (let index = 0; index + 1 < cuts.length; index++) {
      const [start, stop] = [cuts[index], cuts[index + 1]];
      parts.push({ session: await session(`body-${start}-${stop}`), start, stop });
    }
    const config = await json('tokenizer_config.json');
    const tokenizer = new Tokenizer(await json('tokenizer.json'), config);
    const template = names.has('chat_template.jinja')
      ? new Template(await readFile(join(folder, 'chat_template.jinja'), 'utf8'))
      : null;
    const generation = names.has('generation_config.json') ? await json('generation_config.json') : {};
    const ends = new Set([generation.eos_token_id ?? []].flat());
    return new Model(plan, parts, await session('head'), tokenizer, template, config, ends);
  }

  /** The prompt that the model was trained to answer. @param {Message[]} messages @returns {string} */
  render(messages) {
    if (!this.template) throw new Error('this artifact has no chat template; give generate() a text');
    const { bos_token: bos, eos_token: eos } = this.config;
    /** @param {any} token */
    const text = (token) => token?.content ?? token ?? '';
    return this.template.render({
      messages, add_generation_prompt: true, bos_token: text(bos), eos_token: text(eos),
    });
  }

  /**
   * Append tokens, and return the logits of the last one.
   * @param {number[]} ids @returns {Promise<Float32Array>}
   */
  async feed(ids) {
    const capacity = this.plan.storage.capacity_tokens;
    if (this.#length + ids.length > capacity) throw new Error(`the text is longer than ${capacity} tokens`);
    let hidden = null;
    for (let start = 0; start < ids.length; start += this.plan.chunk_tokens) {
      hidden = await this.#body(ids.slice(start, start + this.plan.chunk_tokens));
    }
    if (!hidden) throw new Error('there are no tokens to feed');
    const width = this.plan.model.hidden_size;
    const last = new Tensor('float32', /** @type {Float32Array} */ (hidden.data).slice(-width), [1, width]);
    return /** @type {Float32Array} */ ((await this.head.run({ hidden_in: last })).logits.data);
  }

  /** Forget every token. */
  reset() {
    this.#length = 0;
  }

  /**
   * Answer messages, or go on with a text: pieces of text, as they are decided.
   * @param {Message[] | string} prompt @param {Options} [options] @returns {AsyncGenerator<string>}
   */
  async *generate(prompt, { maxTokens = 256, signal } = {}) {
    this.reset();
    const text = typeof prompt === 'string' ? prompt : this.render(prompt);
    // A template writes the special tokens itself.
    const ids = this.tokenizer.encode(text, { add_special_tokens: typeof prompt === 'string' }).ids;
    if (!ids.length) throw new Error('the prompt is empty');
    const room = this.plan.storage.capacity_tokens - ids.length;
    /** @type {number[]} */
    const answer = [];
    let shown = 0;
    let logits = await this.feed(ids);
    while (answer.length < Math.min(maxTokens, room)) {
      signal?.throwIfAborted();
      const chosen = argmax(logits);
      if (this.ends.has(chosen)) break;
      answer.push(chosen);
      const said = this.tokenizer.decode(answer, { skip_special_tokens: true });
      if (!said.endsWith('\uFFFD')) {  // the bytes of a character may come in several tokens
        if (said.length > shown) yield said.slice(shown);
        shown = said.length;
      }
      if (answer.length < Math.min(maxTokens, room)) logits = await this.feed([chosen]);
    }
  }

  /** @param {number[]} ids @returns {Promise<Tensor>} hidden states */
  async #body(ids) {
    const total = this.#length + ids.length;
    const seqlens_k = new Tensor('int32', Int32Array.of(total - 1), [1]);
    /** @type {Tensor} */
    let hidden = new Tensor('int64', BigInt64Array.from(ids, BigInt), [1, ids.length]);
    for (const { session, start, stop } of this.parts) {
      /** @type {Record<string, Tensor>} */
      const feeds = { seqlens_k, total: new Tensor('int32', Int32Array.of(total), []) };
      feeds[start === 0 ? 'input_ids' : 'hidden_in'] = hidden;
      /** @type {Record<string, Tensor | null>} */
      const fetches = { hidden: null };
      for (let layer = start; layer < stop; layer++) {
        for (const name of [`${layer}.key`, `${layer}.value`]) {
          feeds[`past.${name}`] = this.#cache[name];
          fetches[`present.${name}`] = this.#cache[name];
        }
      }
      hidden = /** @type {Tensor} */ ((await session.run(feeds, fetches)).hidden);
    }
    this.#length = total;
    return hidden;
  }
}

/** The plan and file names of an artifact whose files are those of its manifest. @param {string} folder */
async function checkedManifest(folder) {
  const path = join(folder, 'manifest.json');
  if ((await lstat(path)).size > MOST_MANIFEST_BYTES) throw new Error(`${path} is too large for a manifest`);
  const { plan, files } = JSON.parse(await readFile(path, 'utf8'));
  for (const [name, { bytes, sha256 }] of Object.entries(files)) {
    if (!NAME.test(name)) throw new Error(`${path} names ${JSON.stringify(name)}, which is no file of an artifact`);
    const found = await lstat(join(folder, name));
    if (!found.isFile() || found.size !== bytes || (await sha256Of(join(folder, name))) !== sha256) {
      throw new Error(`${name} is not the file that the manifest describes; copy the artifact again`);
    }
  }
  return { plan, names: new Set(Object.keys(files)) };
}

/** @param {string} path @returns {Promise<string>} */
async function sha256Of(path) {
  const hash = createHash('sha256');
  for await (const piece of createReadStream(path)) hash.update(piece);
  return hash.digest('hex');
}

/** Refuse what this loop does not compute. @param {any} plan */
function refuse(plan) {
  const { target, backend, model, storage, cache } = plan;
  if (target !== 'onnx' || backend !== 'cpu') throw new Error(`an artifact for ${target} ${backend}; export it for onnx`);
  if (model.encoder) throw new Error('an encoder has no text to generate');
  if (storage.kv_bits !== 32) throw new Error(`a cache of ${storage.kv_bits} bits; export with --kv-bits 32`);
  if (cache.window) throw new Error('a cache with a window; export without --window');
  if (model.layers.some((/** @type {any} */ layer) => !layer.stores_kv)) {
    throw new Error(`${model.family} has layers without keys and values, which this example does not run`);
  }
}

/** The first of the largest. @param {Float32Array} logits @returns {number} */
function argmax(logits) {
  let best = 0;
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
  return best;
}
