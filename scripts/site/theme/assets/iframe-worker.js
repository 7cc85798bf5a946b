// A browser starts no Worker from file://. Search then runs in a hidden frame that understands the same messages.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.frame = frame.contentWindow;
    // Firefox would replace the frame's first document later, with what was put into it.
    this.frame.document.open();
    this.frame.document.write("<body></body>");
    this.frame.document.close();
    this.ready = new Promise((resolve) => {
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      this.load(url).then(resolve);
    });
  }

  load(url) {
    const script = this.frame.document.createElement("script");
    script.src = url;
    this.frame.document.body.append(script);
    return new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }));
  }

  postMessage(data) {
    this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
  }
}
// The theme's worker looks for the second name.
if (location.protocol === "file:") window.Worker = window.IFrameWorker = FrameWorker;
