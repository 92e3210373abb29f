// Colours texts as VS Code does: reads a JSON list of texts, writes [text, scopes] of every token of each as JSON.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const require = createRequire(import.meta.url);
const { INITIAL, Registry, parseRawGrammar } = require("vscode-textmate");
const { OnigScanner, OnigString, loadWASM } = require("vscode-oniguruma");

await loadWASM(readFileSync(require.resolve("vscode-oniguruma/release/onig.wasm")).buffer);
const path = new URL("syntaxes/xtrain.tmLanguage.json", import.meta.url).pathname;
const registry = new Registry({
  onigLib: Promise.resolve({
    createOnigScanner: (patterns) => new OnigScanner(patterns),
    createOnigString: (text) => new OnigString(text),
  }),
  loadGrammar: async () => parseRawGrammar(readFileSync(path, "utf8"), path),
});
const grammar = await registry.loadGrammar("source.xtrain");
const answers = JSON.parse(readFileSync(0, "utf8")).map((text) => {
  let state = INITIAL;
  const found = [];
  for (const line of text.split("\n")) {
    const { tokens, ruleStack } = grammar.tokenizeLine(line, state);
    state = ruleStack;
    for (const { startIndex, endIndex, scopes } of tokens) found.push([line.slice(startIndex, endIndex), scopes]);
  }
  return found;
});
process.stdout.write(JSON.stringify(answers));
