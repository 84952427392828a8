// Keeps conversations in the browser's IndexedDB, where they survive a killed tab or browser.
// Tabs share it: each write changes the fields that it names, and tells the other tabs.

const NAME = "mlx_spec";
const VERSION = 1;
const [CONVERSATIONS, EXCHANGES] = ["conversations", "exchanges"];

// Records: conversations {id, title, leaf, updated, deleted, settings}, exchanges {id, conversation, parent, ...}.
const opening = new Promise((resolve, reject) => {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    request.result.createObjectStore(EXCHANGES, { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
opening.catch(() => {});

export const isKept = () => opening.then(() => true, () => false);

// A write to a conversation that another tab has deleted.
export class Gone extends Error {}

// Runs `work(stores, tools)` in one transaction. Returns what it gives to `done`, once all is on the disk.
async function transact(mode, work) {
  const database = await opening;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([CONVERSATIONS, EXCHANGES], mode);
    let [value, failure] = [undefined, null];
    transaction.oncomplete = () => resolve(value);
    transaction.onabort = () => reject(failure ?? transaction.error);
    const done = (result) => { value = result; };
    const abort = (error) => { failure = error; transaction.abort(); };
    const attempt = (action) => { try { action(); } catch (error) { abort(error); } };
    const ask = (request, use) => { request.onsuccess = () => attempt(() => use(request.result)); };
    const [conversations, exchanges] = [CONVERSATIONS, EXCHANGES].map((name) => transaction.objectStore(name));
    attempt(() => work({ conversations, exchanges }, { ask, done, abort }));
  });
}

const tabs = new BroadcastChannel(NAME);

// Tells the other tabs of a conversation that has changed, and of an exchange that has ended.
export const tell = (conversation, exchange = null) => tabs.postMessage({ conversation, exchange });
export const onChange = (take) => tabs.addEventListener("message", ({ data }) => take(data));

// Changes some fields of a stored conversation. Rejects with Gone if it is not there.
export async function change(id, fields) {
  await transact("readwrite", ({ conversations }, { ask, abort }) => {
    ask(conversations.get(id), (stored) => { stored ? conversations.put({ ...stored, ...fields }) : abort(new Gone()); });
  });
  tell(id);
}

// Writes a record: a new conversation, or an exchange, if its conversation is there.
export const put = (store, record) => transact("readwrite", (stores, { ask, abort }) => {
  if (store === CONVERSATIONS) stores.conversations.put(record);
  else ask(stores.conversations.getKey(record.conversation), (key) => { key ? stores.exchanges.put(record) : abort(new Gone()); });
});

const listed = (pick) => transact("readonly", (stores, { ask, done }) => ask(pick(stores), done));
export const listConversations = () => listed(({ conversations }) => conversations.getAll());
export const allExchanges = () => listed(({ exchanges }) => exchanges.getAll());
export const getExchange = (id) => listed(({ exchanges }) => exchanges.get(id));
export const listExchanges = (conversation) =>
  listed(({ exchanges }) => exchanges.index("conversation").getAll(conversation)); // sorted by id, and so by age

// Removes a deleted conversation and its exchanges.
export async function purge(conversation) {
  await transact("readwrite", ({ conversations, exchanges }, { ask }) => {
    ask(conversations.get(conversation), (stored) => {
      if (!stored?.deleted) return; // another tab has brought it back
      conversations.delete(conversation);
      ask(exchanges.index("conversation").getAllKeys(conversation), (keys) => keys.forEach((key) => exchanges.delete(key)));
    });
  });
}

let lastTime = 0;

// Returns a new id. Ids sort by time.
export function newId() {
  lastTime = Math.max(Date.now(), lastTime + 1);
  return `${lastTime.toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
}

// Returns a function that calls `write` with the present state. All calls during a write lead to one more write.
export function keeper(write, onEnd) {
  let running = null;
  let isStale = false;
  const run = async () => {
    try {
      while (isStale) {
        isStale = false;
        await write();
      }
      onEnd(null);
    } catch (error) {
      onEnd(error);
    } finally {
      running = null;
    }
  };
  return () => {
    isStale = true;
    running ??= run();
    return running;
  };
}

// Returns why something was not kept.
export function problemOf(error) {
  if (error instanceof Gone) return "This conversation was deleted in another tab: export what you need.";
  if (error?.name === "QuotaExceededError") {
    return "The storage of this browser is full, so this is not kept: export and delete conversations, or make room on the disk.";
  }
  if (error?.name === "Error") return error.message; // of an import
  return "This browser keeps no conversations: export what you need.";
}
