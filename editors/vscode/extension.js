// Starts `xtrain lsp` when a spec is opened; everything else is the server's.
const { commands, window, workspace } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

async function start() {
  const [command, ...args] = workspace.getConfiguration("xtrain").get("command");
  const folder = workspace.workspaceFolders?.[0]?.uri.fsPath;
  const server = { command, args, options: { cwd: folder } };
  const watched = workspace.createFileSystemWatcher("**/*.{xtrain,py}");
  client = new LanguageClient("xtrain", "xtrain", server, {
    documentSelector: [{ language: "xtrain" }],
    synchronize: { fileEvents: watched },
  });
  try {
    await client.start();
  } catch (error) {
    client = undefined;
    window.showErrorMessage(
      `\`${[command, ...args].join(" ")}\` cannot be started (${error.message ?? error}). ` +
        'Install it with `pip install "xtrain[lsp]"`, or name it in the setting `xtrain.command`.',
    );
  }
}

async function activate(context) {
  const restart = async () => {
    await client?.stop();
    await start();
  };
  context.subscriptions.push(
    commands.registerCommand("xtrain.restart", restart),
    workspace.onDidChangeConfiguration((change) => change.affectsConfiguration("xtrain.command") && restart()),
  );
  await start();
}

const deactivate = () => client?.stop();

module.exports = { activate, deactivate };
