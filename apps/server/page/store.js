// Keeps conversations in the browser's IndexedDB, where they survive a killed tab or browser.
// If a browser forbids the database, nothing is kept, and the page says so.

const NAME = "mlx_spec";
const VERSION = 1;

// Records: conversations {id, title, leaf, updated, deleted}, exchanges {id, conversation, parent, ...}.
const opening = new Promise((resolve, reject) => {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("exchanges", { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
opening.catch(() => {});

export const isKept = () => opening.then(() => true, () => false);

async function ask(store, mode, question) {
  const database = await opening;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(store, mode);
    const request = question(transaction.objectStore(store));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error); // the disk is full
  });
}

export const put = (store, record) => ask(store, "readwrite", (found) => found.put(record));
export const listConversations = () => ask("conversations", "readonly", (store) => store.getAll());
export const listExchanges = (conversation) =>
  ask("exchanges", "readonly", (store) => store.index("conversation").getAll(conversation)); // sorted by id, and so by age

export async function purge(conversation) {
  for (const { id } of await listExchanges(conversation)) await ask("exchanges", "readwrite", (store) => store.delete(id));
  await ask("conversations", "readwrite", (store) => store.delete(conversation));
}

let lastTime = 0;

// Returns a new id. Ids sort by time.
export function newId() {
  lastTime = Math.max(Date.now(), lastTime + 1);
  return `${lastTime.toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
}

// Returns a function that writes the present record. All calls during a write lead to one more write.
export function keeper(store, record, onFailure) {
  let isWriting = false;
  let isStale = false;
  return async function write() {
    isStale = true;
    if (isWriting) return;
    isWriting = true;
    try {
      while (isStale) {
        isStale = false;
        await put(store, record());
      }
    } catch (error) {
      onFailure(error);
    } finally {
      isWriting = false;
    }
  };
}
