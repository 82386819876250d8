// The pictures and videos of the next question: checked when they are chosen, not when they are sent.

import { $, bytes, make } from "./dom.js";

const PICTURES = "JPEG, PNG, WebP or GIF", VIDEOS = "MP4, WebM, MKV or AVI";
const text = (head, from, to) => String.fromCharCode(...head.slice(from, to));

// The media type of a file, from its first bytes; null if it is none that the server takes.
function kindOf(head) {
  if (text(head, 1, 4) === "PNG") return "image/png";
  if (head[0] === 0xff && head[1] === 0xd8) return "image/jpeg";
  if (text(head, 0, 4) === "GIF8") return "image/gif";
  if (text(head, 0, 4) === "RIFF") return { WEBP: "image/webp", "AVI ": "video/x-msvideo" }[text(head, 8, 12)] ?? null;
  if (text(head, 4, 8) === "ftyp") return /^(avif|heic|heix|mif1)/.test(text(head, 8, 12)) ? null : "video/mp4";
  if (head[0] === 0x1a && head[1] === 0x45 && head[2] === 0xdf && head[3] === 0xa3) return "video/webm";
  return null;
}

// Whether the file ends before its picture does. Browsers show such a picture; the server refuses it.
async function cutOff(file, kind) {
  const data = new Uint8Array(await file.arrayBuffer());
  const has = (...end) => {
    for (let i = data.length - end.length; i >= 0; i--) if (end.every((byte, j) => data[i + j] === byte)) return true;
    return false;
  };
  if (kind === "image/png") return !has(0x49, 0x45, 0x4e, 0x44);
  if (kind === "image/jpeg") return !has(0xff, 0xd9);
  if (kind === "image/webp") return new DataView(data.buffer).getUint32(4, true) + 8 > data.length;
  return false;
}

async function shows(url) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
    return true;
  } catch {
    return false;
  }
}

function read(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("cannot be read"));
    reader.readAsDataURL(blob);
  });
}

// A file as `{ name, kind, url, preview }`: a data: URL to send and a blob: URL to show. Fails with what is wrong with it.
async function checked(file, takes) {
  const kind = kindOf(new Uint8Array(await file.slice(0, 16).arrayBuffer()));
  const pictures = takes.videos ? `${PICTURES} picture, or ${VIDEOS} video` : `${PICTURES} picture`;
  if (file.size === 0) throw new Error("is empty");
  if (kind === null) throw new Error(`is no ${pictures}`);
  const video = kind.startsWith("video/");
  if (video && !takes.videos) throw new Error("is a video, and this model takes none");
  const most = video ? takes.video_bytes : takes.picture_bytes;
  if (file.size > most) throw new Error(`has ${bytes(file.size)}; this server takes at most ${bytes(most)}`);
  const blob = new Blob([file], { type: kind }), preview = URL.createObjectURL(blob);
  if (!video && (await cutOff(file, kind) || !(await shows(preview)))) {
    URL.revokeObjectURL(preview);
    throw new Error("is damaged: it cannot be shown to its end");
  }
  return { name: file.name || `pasted.${kind.split("/")[1]}`, kind, url: await read(blob), preview };
}

export const isVideo = (one) => one.kind.startsWith("video/");

// A small view of a picture or video.
export function thumbnail(one) {
  const view = make(isVideo(one) ? "video" : "img");
  view.src = one.preview;
  view.title = one.name;
  if (isVideo(one)) Object.assign(view, { controls: true, muted: true, preload: "metadata" });
  else view.alt = one.name;
  if (isVideo(one)) view.setAttribute("aria-label", one.name);
  return view;
}

// The tray. `takes()`: what the server takes (of /v1/overview).
export class Tray {
  constructor(takes) {
    this.takes = takes;
    this.items = [];
    this.troubles = []; // what is wrong with files that were added
    this.unread = 0; // how many files are still to be read
    this.generation = 0; // how often the tray was cleared: files of an earlier generation are dropped
    this.reading = Promise.resolve();
  }

  // Add files, one after the other, in this order; what is wrong with some of them is said at once.
  add(files) {
    const wanted = [...files], generation = this.generation;
    this.#forget();
    this.unread += wanted.length;
    this.reading = this.reading.then(() => this.#read(wanted, generation));
  }

  async #read(files, generation) {
    for (const file of files) {
      let one = null, trouble = "";
      try {
        one = await checked(file, this.takes());
      } catch (error) {
        trouble = error.message;
      }
      if (generation !== this.generation) return;
      this.unread -= 1;
      trouble ||= this.#tooMuch(one);
      if (trouble) this.troubles.push(`${file.name || "what you pasted"} ${trouble}.`);
      else this.items.push(one);
    }
    this.show();
  }

  // Waits until each file is read. False if something is wrong with one of them, which is said, or if the tray was cleared.
  async ready() {
    if (this.unread === 0) return true;
    const { generation } = this;
    while (this.unread > 0 && generation === this.generation) await this.reading;
    if (generation !== this.generation) return false;
    if (this.troubles.length > 0) this.show("The question was not sent.");
    return this.troubles.length === 0;
  }

  // Forget the troubles, unless files are being read: then there may be some that nobody has seen.
  #forget() {
    if (this.unread === 0) this.troubles = [];
  }

  // Why a picture or video has no place beside the others; "" if it has.
  #tooMuch(one) {
    const takes = this.takes(), noun = isVideo(one) ? "video" : "picture", most = takes[`${noun}s`];
    const n = this.items.filter((other) => isVideo(other) === isVideo(one)).length;
    const sent = this.items.reduce((sum, other) => sum + other.url.length, one.url.length);
    if (n >= most) return `is too much: a request holds at most ${most} ${noun}${most === 1 ? "" : "s"}`;
    if (sent > takes.body_bytes) return `is too much: a request has at most ${bytes(takes.body_bytes)}`;
    return "";
  }

  // The items, which leave the tray.
  take() {
    const items = this.items;
    this.#forget();
    this.put([]);
    return items;
  }

  put(items) {
    this.items = items;
    this.show();
  }

  // Drop everything, files that are being read too.
  clear() {
    this.generation += 1;
    this.unread = 0;
    this.take();
  }

  #remove(one) {
    this.#forget();
    this.put(this.items.filter((other) => other !== one));
  }

  // `more`: what is said after the troubles.
  show(more = "") {
    $("trouble").textContent = [...this.troubles, more].join(" ").trim();
    $("tray").hidden = this.items.length === 0;
    $("tray").replaceChildren(...this.items.map((one) => {
      const entry = make("li"), away = make("button", "plain", "×");
      away.type = "button";
      away.setAttribute("aria-label", `Remove ${one.name}`);
      away.onclick = () => this.#remove(one);
      entry.append(thumbnail(one), away);
      return entry;
    }));
  }
}
