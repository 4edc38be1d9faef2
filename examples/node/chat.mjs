// node chat.mjs ARTIFACT QUESTION: prints the answer as it is written. With --raw, the text goes on instead.
// @ts-check
import { argv, exit, stderr, stdout } from 'node:process';
import { Model } from './model.mjs';

const [folder, question, raw] = argv.slice(2);
if (!folder || !question) {
  stderr.write('node chat.mjs ARTIFACT QUESTION [--raw]\n');
  exit(2);
}
const model = await Model.open(folder);
const prompt = raw === '--raw' ? question : [{ role: 'user', content: question }];
for await (const piece of model.generate(prompt, { maxTokens: 64 })) stdout.write(piece);
stdout.write('\n');
