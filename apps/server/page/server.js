// The server, as this page talks to it. The key lives in this variable and nowhere else.

let key = "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(text) {
  key = text;
}

function headers(more = {}) {
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
  } catch {
    // not JSON: the status says it
  }
  return new Refused(response.status, message);
}

export async function models() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data ?? [];
}

// Its status is 503 while the server loads or leaves; the body says which.
export async function health() {
  return (await fetch("/health", { headers: headers(), cache: "no-store" })).json();
}

export async function metrics() {
  const response = await fetch("/metrics", { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.text();
}

// Yields the chunks of a streamed answer.
export async function* complete(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, include_draft: true },
    }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of payloads(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(200, chunk.error.message);
    yield chunk;
  }
  throw new Refused(200, "the stream ended early");
}

async function* payloads(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (held + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      held = parts.pop();
      for (const part of parts) yield* lines(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function* lines(part) {
  for (const line of part.split(/\r?\n/)) {
    if (line.startsWith("data:")) yield line.slice(5).trimStart();
  }
}
