// A page that is opened from the disk may not start a worker. The search then runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.document.open()
      inside.document.write("<!doctype html><title>search</title><body></body>")
      inside.document.close()
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.deliver = data => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
        this.waiting.forEach(this.deliver)
      }
      inside.document.body.append(script)
    }
    postMessage(data) {
      if (this.deliver) this.deliver(data)
      else this.waiting.push(data)
    }
    terminate() {}
  }
}
