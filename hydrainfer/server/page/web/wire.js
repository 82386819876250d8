// One streamed chat over the wire. XMLHttpRequest, since `fetch` does not say how much of a body has been sent.

// The JSON objects of the server-sent events in a text that grows. Returns a function of the text so far.
function reader(take) {
  let begin = 0;
  return (text) => {
    for (let end; (end = text.indexOf("\n\n", begin)) >= 0; begin = end + 2) {
      const event = text.slice(begin, end);
      if (event.startsWith("data: {")) take(JSON.parse(event.slice(6)));
    }
  };
}

function refusal(status, text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answers with ${status}`;
  }
}

// Sends `body`. `on.sent(bytes, of)` while it is sent, `on.accepted()` once it has been, `on.event(object)` for each event.
// Returns `{ done, stop }`: a promise that fails with the server's words, and a function that ends the request.
export function stream(url, headers, body, on) {
  const request = new XMLHttpRequest();
  const done = new Promise((resolve, reject) => {
    let failure = null;
    const read = reader((event) => {
      if (event.error) failure ??= event.error.message;
      else on.event(event);
    });
    const news = () => { if (request.status === 200) read(request.responseText); };
    request.upload.onprogress = (e) => on.sent(e.loaded, e.total);
    request.upload.onload = () => on.accepted();
    request.onprogress = news;
    request.onload = () => {
      try {
        news();
      } catch (error) {
        failure ??= `the answer cannot be read (${error.message})`;
      }
      if (request.status !== 200) reject(new Error(refusal(request.status, request.responseText)));
      else if (failure !== null) reject(new Error(failure));
      else resolve();
    };
    request.onerror = () => reject(new Error("the server does not answer, or the connection broke"));
    request.onabort = () => resolve();
    request.open("POST", url);
    for (const [name, value] of Object.entries({ "Content-Type": "application/json", ...headers })) {
      request.setRequestHeader(name, value);
    }
    request.send(JSON.stringify(body));
  });
  return { done, stop: () => request.abort() };
}
